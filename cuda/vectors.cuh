/* Rows read and written 16 bytes at a time where their layout allows it, else element by element; a group of lanes
 * takes a row. */
#ifndef MUVOX_CUDA_VECTORS_H
#define MUVOX_CUDA_VECTORS_H

#include "device.cuh"
#include "launch.cuh"

#include <type_traits>

/* V elements that are next to each other. */
template <typename T, int V> struct alignas(V * sizeof(T)) elements {
    T at[V];
};

template <int V, typename T> __device__ __forceinline__ elements<T, V> read(const T *from)
{
    return *reinterpret_cast<const elements<T, V> *>(from);
}

/* The same, or zeros. Whole words: put together of halves, the zeros would take several instructions for each. */
template <int V, typename T> __device__ __forceinline__ elements<T, V> read_if(bool there, const T *from)
{
    if constexpr (sizeof(elements<T, V>) == sizeof(uint4)) {
        uint4 words = {0, 0, 0, 0};

        if (there) words = *reinterpret_cast<const uint4 *>(from);
        return *reinterpret_cast<const elements<T, V> *>(&words);
    } else {
        elements<T, V> x;

#pragma unroll
        for (int v = 0; v < V; v++) x.at[v] = there ? from[v] : narrow<T>(0);
        return x;
    }
}

/* V elements from column c on of several rows, all asked for before the first is needed; zeros for a row below 0. */
template <int V, typename T, int N>
__device__ __forceinline__ void read_rows(const muvox_matrix &table, const int64_t (&row)[N], int64_t c,
                                          elements<T, V> (&x)[N])
{
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] = read_if<V>(row[j] >= 0, static_cast<const T *>(table.data) + row[j] * table.row_stride + c);
}

template <int V, typename T> __device__ __forceinline__ void write(T *to, const wide_t<T> (&x)[V])
{
    elements<T, V> all;

#pragma unroll
    for (int v = 0; v < V; v++) all.at[v] = narrow<T>(x[v]);
    if constexpr (sizeof all == sizeof(uint4)) {
        const uint4 words = *reinterpret_cast<const uint4 *>(&all);

        /* Assigned, they may become four stores. */
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                     "r"(words.w)
                     : "memory");
    } else
        *reinterpret_cast<elements<T, V> *>(to) = all;
}

/* Whether all rows of a table are whole vectors of V elements, aligned. */
template <typename T, int V, typename M> bool whole_vectors(const M &m)
{
    return m.cols % V == 0 && m.row_stride % V == 0 && reinterpret_cast<uintptr_t>(m.data) % (V * sizeof(T)) == 0;
}

/* f with the number of elements that one load may take of each of these tables, as a type whose ::value it is. */
template <typename T, typename F, typename... M> muvox_status with_vectors(F f, const M &...tables)
{
    constexpr int V = 16 / sizeof(T);

    return (whole_vectors<T, V>(tables) && ...) ? f(std::integral_constant<int, V>())
                                                : f(std::integral_constant<int, 1>());
}

/* Groups of 2^bits lanes, as many as a row has vectors, `least` or more, at most a warp. */
inline int lane_bits(int64_t vectors, int64_t least = 1)
{
    return bits_below(vectors < least ? least : vectors > WARP ? (int64_t)WARP : vectors);
}

/* The number of this thread's group of all, and its lane in it. */
struct lane_group {
    int64_t                    number;
    int                        lane, lanes;
    __device__ __forceinline__ lane_group(int bits)
        : number(((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> bits), lane((int)threadIdx.x & ((1 << bits) - 1)),
          lanes(1 << bits)
    {
    }
};

#endif
