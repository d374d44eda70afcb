#include "box.h"

#include <stdarg.h>
#include <stdio.h>

enum { MAX_DIMS = 3 };

#ifdef MUVOX_CUDA
#define DEVICE_TYPE aoti_torch_device_type_cuda()
#define DEVICE_NAME "a CUDA device"
#else
#define DEVICE_TYPE aoti_torch_device_type_cpu()
#define DEVICE_NAME "the CPU"
#endif

/* Keeps the first failure. */
static void fail(muvox_box *box, const char *format, ...)
{
    const int used = snprintf(NULL, 0, "%s: ", box->op);
    va_list   arguments;

    if (box->failed) return;
    box->failed = true;
    snprintf(box->ctx.message, sizeof box->ctx.message, "%s: ", box->op);
    va_start(arguments, format);
    vsnprintf(box->ctx.message + used, sizeof box->ctx.message - (size_t)used, format, arguments);
    va_end(arguments);
}

#ifdef MUVOX_CUDA
/* Workspace from torch's caching allocator, on the current stream of the current device, which the call has made its own. */
static void *allocate(void *user, size_t bytes)
{
    void *block = NULL;

    (void)user;
    return aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &block) ? NULL : block;
}

static void give_back(void *user, void *block)
{
    (void)user;
    aoti_torch_cuda_caching_allocator_raw_delete(block);
}

static void open_context(muvox_box *box)
{
    /* The dispatcher came here because some tensor is on a device; splits and masks that are not given may lie elsewhere. */
    for (int i = 0; i < box->arguments; i++) {
        int32_t type = 0, index = 0;

        if (aoti_torch_get_device_type(box->argument[i], &type) || type != DEVICE_TYPE) continue;
        aoti_torch_get_device_index(box->argument[i], &index);
        box->ctx.device = index;
        break;
    }
    box->ctx.alloc = allocate;
    box->ctx.free = give_back;
    if (aoti_torch_get_current_cuda_stream(box->ctx.device, &box->ctx.stream))
        fail(box, "device %d has no stream", box->ctx.device);
}
static bool same_index(const muvox_box *box, int32_t index)
{
    return index == box->ctx.device;
}
#else
static void open_context(muvox_box *box)
{
    uint32_t threads;

    if (torch_get_num_threads(&threads) == 0) box->ctx.threads = (int)threads;
}

/* There is one CPU, whatever index torch gives it. */
static bool same_index(const muvox_box *box, int32_t index)
{
    (void)box;
    (void)index;
    return true;
}
#endif

muvox_box box_open(const char *op, StableIValue *stack, int tensors)
{
    muvox_box box = {.op = op, .stack = stack, .arguments = tensors, .ctx = {.struct_size = sizeof box.ctx}};

    for (int i = 0; i < tensors; i++) memcpy(&box.argument[i], &stack[i], sizeof box.argument[i]);
    open_context(&box);
    return box;
}

void box_close(muvox_box *box, muvox_status status)
{
    for (int i = 0; i < box->arguments; i++) aoti_torch_delete_tensor_object(box->argument[i]);
    for (int i = 0; i < box->copies; i++) aoti_torch_delete_tensor_object(box->copy[i]);
    if (box->failed || status != MUVOX_OK) {
        char message[sizeof box->ctx.message + 8];

        for (int i = 0; i < box->results; i++) aoti_torch_delete_tensor_object(box->result[i]);
        snprintf(message, sizeof message, "muvox::%s", box->ctx.message);
        aoti_torch_check(false, box->op, __FILE__, __LINE__, message);
        return;
    }
    for (int i = 0; i < box->results; i++) {
        box->stack[i] = 0;
        memcpy(&box->stack[i], &box->result[i], sizeof box->result[i]);
    }
}

/* The dtype, if the library has it; otherwise name says what it is. */
static bool dtype_of(int32_t code, muvox_dtype *dtype, const char **name)
{
    const struct {
        int32_t     code;
        int         dtype;
        const char *name;
    } known[] = {
        {aoti_torch_dtype_float32(), MUVOX_F32, "float"},
        {aoti_torch_dtype_float64(), MUVOX_F64, "double"},
        {aoti_torch_dtype_float16(), MUVOX_F16, "half"},
        {aoti_torch_dtype_bfloat16(), MUVOX_BF16, "bfloat16"},
        {aoti_torch_dtype_int32(), MUVOX_I32, "int32"},
        {aoti_torch_dtype_uint8(), MUVOX_U8, "uint8"},
        {aoti_torch_dtype_int64(), MUVOX_I64, "int64"},
        {aoti_torch_dtype_int16(), -1, "int16"},
        {aoti_torch_dtype_int8(), -1, "int8"},
        {aoti_torch_dtype_bool(), -1, "bool"},
    };

    *name = "of another dtype";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].code != code) continue;
        *name = known[i].name;
        if (known[i].dtype < 0) return false;
        *dtype = (muvox_dtype)known[i].dtype;
        return true;
    }
    return false;
}

static int32_t code_of(muvox_dtype dtype)
{
    switch (dtype) {
    case MUVOX_F16: return aoti_torch_dtype_float16();
    case MUVOX_BF16: return aoti_torch_dtype_bfloat16();
    case MUVOX_F32: return aoti_torch_dtype_float32();
    case MUVOX_F64: return aoti_torch_dtype_float64();
    case MUVOX_I32: return aoti_torch_dtype_int32();
    case MUVOX_U8: return aoti_torch_dtype_uint8();
    case MUVOX_I64: return aoti_torch_dtype_int64();
    }
    return -1;
}

typedef struct {
    AtenTensorHandle handle;
    int              dims;
    int32_t          code; /* torch's number for the dtype */
    int64_t          size[MAX_DIMS], stride[MAX_DIMS];
} tensor;

/* Describes an argument with as many dimensions as expected; shape names them for the message. */
static bool describe(muvox_box *box, int argument, const char *name, int dims, const char *shape, tensor *t)
{
    int32_t                device = 0, index = 0;
    int64_t                found = 0, *sizes = NULL, *strides = NULL;
    const AtenTensorHandle handle = box->argument[argument];

    if (box->failed) return false;
    if (aoti_torch_get_device_type(handle, &device) || aoti_torch_get_device_index(handle, &index) ||
        aoti_torch_get_dim(handle, &found) || aoti_torch_get_dtype(handle, &t->code) ||
        aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides))
        fail(box, "%s is not a readable tensor", name);
    else if (device != DEVICE_TYPE || !same_index(box, index))
        fail(box, "%s is on another device, expected " DEVICE_NAME " like the other tensors", name);
    else if (found != dims)
        fail(box, "%s has %lld dimensions, expected %d: %s", name, (long long)found, dims, shape);
    if (box->failed) return false;
    t->handle = handle;
    t->dims = dims;
    memcpy(t->size, sizes, sizeof *sizes * (size_t)dims);
    memcpy(t->stride, strides, sizeof *strides * (size_t)dims);
    return true;
}

/* Row-major strides; false if the number of elements does not fit. */
static bool row_major(int dims, const int64_t *size, int64_t *stride)
{
    int64_t next = 1;

    for (int d = dims - 1; d >= 0; d--) {
        stride[d] = next;
        if (__builtin_mul_overflow(next, size[d] ? size[d] : 1, &next)) return false;
    }
    return true;
}

/* Replaces a tensor by a copy whose columns are next to each other. Rows and sets that all lie in one place (stride 0,
 * such as the gradient of a sum) still do in the copy. */
static void compact(muvox_box *box, const char *name, tensor *t)
{
    AtenTensorHandle copy = NULL, once = NULL;
    int64_t          size[MAX_DIMS], stride[MAX_DIMS];
    bool             done;

    for (int d = 0; d < t->dims; d++) size[d] = d < t->dims - 1 && t->stride[d] == 0 && t->size[d] > 1 ? 1 : t->size[d];
    done = row_major(t->dims, size, stride) &&
           !aoti_torch_empty_strided(t->dims, size, stride, t->code, DEVICE_TYPE, box->ctx.device, &copy);
    if (done) {
        box->copy[box->copies++] = copy;
        done = !aoti_torch__reinterpret_tensor(t->handle, t->dims, size, t->stride, 0, &once) &&
               !aoti_torch_copy_(copy, once, 0);
        if (once) aoti_torch_delete_tensor_object(once);
    }
    if (!done) {
        fail(box, "out of memory for a copy of %s with contiguous columns", name);
        return;
    }
    t->handle = copy;
    for (int d = 0; d < t->dims; d++)
        if (t->size[d] == size[d]) t->stride[d] = stride[d];
}

muvox_sets box_sets(muvox_box *box, int splits, const char *splits_name, int rows, const char *rows_name)
{
    const muvox_sets none = {0};
    muvox_sets      *sets = &box->sets;
    const void      *data = NULL;
    tensor           t;

    *sets = none;
    if (!describe(box, splits, splits_name, 1, "one more than there are sets", &t)) return none;
    if (t.code != aoti_torch_dtype_int64()) {
        muvox_dtype dtype;
        const char *got;

        dtype_of(t.code, &dtype, &got);
        fail(box, "%s is %s, expected int64", splits_name, got);
        return none;
    }
    if (t.size[0] == 0) {
        char shape[64];

        snprintf(shape, sizeof shape, "sets, rows, width (%s is empty)", splits_name);
        if (!describe(box, rows, rows_name, 3, shape, &t)) return none;
        sets->count = t.size[0];
        sets->size = t.size[1];
        sets->rows = t.size[0] * t.size[1];
        return *sets;
    }
    if (t.stride[0] != 1 && t.size[0] > 1) compact(box, splits_name, &t);
    if (!box->failed && torch_get_const_data_ptr(t.handle, &data)) fail(box, "%s has no data", splits_name);
    sets->splits = data;
    sets->count = t.size[0] - 1;
    if (describe(box, rows, rows_name, 2, "rows, width (with splits)", &t)) sets->rows = t.size[0];
    return *sets;
}

bool box_has(const muvox_box *box, int argument)
{
    int64_t numel = 0;

    return aoti_torch_get_numel(box->argument[argument], &numel) == 0 && numel > 0;
}

/* What a row holds: as many numbers as the last dimension says, one number, or a bool as a byte. */
typedef enum { WIDTH, COLUMN, MASK } content;

/* The leading dimensions are as expected (−1: any). */
static muvox_matrix unpack(muvox_box *box, int argument, const char *name, int leading, const int64_t *expected,
                           content content, const char *shape)
{
    const bool         width = content == WIDTH;
    const muvox_matrix none = {0};
    muvox_matrix       matrix = {.rows = 1};
    const char        *dtype;
    tensor             t;

    if (!describe(box, argument, name, leading + width, shape, &t)) return none;
    if (!dtype_of(t.code, &matrix.dtype, &dtype) && content != MASK)
        fail(box, "%s is %s, which is not supported", name, dtype);
    if (content == MASK && t.code != aoti_torch_dtype_bool()) fail(box, "%s is %s, expected bool", name, dtype);
    if (content == MASK) matrix.dtype = MUVOX_U8;
    for (int d = 0; d < leading; d++) {
        if (expected[d] >= 0 && t.size[d] != expected[d])
            fail(box, "%s has size %lld in dimension %d, expected %lld: %s", name, (long long)t.size[d], d,
                 (long long)expected[d], shape);
        else
            matrix.rows *= t.size[d];
    }
    if (!box->failed && width && t.size[leading] > 1 && t.stride[leading] != 1) compact(box, name, &t);
    if (!box->failed && torch_get_const_data_ptr(t.handle, &matrix.data)) fail(box, "%s has no data", name);
    if (box->failed) return none;
    matrix.cols = width ? t.size[leading] : 1;
    matrix.row_stride = t.size[leading - 1] == 1 ? matrix.cols : t.stride[leading - 1]; /* torch may have any for one */
    matrix.set_stride = leading == 2 ? t.stride[0] : 0;
    return matrix;
}

/* The leading dimensions of a tensor of rows. */
static int leading_sizes(const muvox_box *box, int64_t *size)
{
    const muvox_sets *sets = &box->sets;

    if (sets->splits) {
        size[0] = sets->rows;
        return 1;
    }
    size[0] = sets->count;
    size[1] = sets->size;
    return 2;
}

muvox_matrix box_rows(muvox_box *box, int argument, const char *name)
{
    int64_t   size[2];
    const int leading = leading_sizes(box, size);

    return unpack(box, argument, name, leading, size, WIDTH,
                  leading == 2 ? "sets, rows, width (splits is empty)" : "rows, width (with splits)");
}

static muvox_matrix column(muvox_box *box, int argument, const char *name, content content)
{
    int64_t   size[2];
    const int leading = leading_sizes(box, size);

    return unpack(box, argument, name, leading, size, content,
                  leading == 2 ? "sets, rows (splits is empty)" : "rows (with splits)");
}

muvox_matrix box_column(muvox_box *box, int argument, const char *name)
{
    return column(box, argument, name, COLUMN);
}

static muvox_matrix optional_column(muvox_box *box, int argument, const char *name, content content)
{
    const muvox_matrix none = {0};

    return box_has(box, argument) ? column(box, argument, name, content) : none;
}

muvox_matrix box_optional_column(muvox_box *box, int argument, const char *name)
{
    return optional_column(box, argument, name, COLUMN);
}

muvox_matrix box_mask(muvox_box *box, int argument)
{
    return optional_column(box, argument, "mask", MASK);
}

muvox_matrix box_per_set(muvox_box *box, int argument, const char *name)
{
    return unpack(box, argument, name, 1, &box->sets.count, WIDTH, "sets, width");
}

muvox_matrix box_table(muvox_box *box, int argument, const char *name)
{
    const int64_t any = -1;

    return unpack(box, argument, name, 1, &any, WIDTH, "rows, width");
}

muvox_matrix box_list(muvox_box *box, int argument, const char *name)
{
    const int64_t any = -1;

    return unpack(box, argument, name, 1, &any, COLUMN, "rows");
}

/* A new row-major tensor; the last of its dimensions is the width, unless each row has one number. */
static muvox_output pack(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int leading,
                         const int64_t *sizes, const int64_t *width)
{
    const muvox_output none = {0};
    muvox_output       output = {.dtype = dtype, .rows = 1, .cols = 1};
    int64_t            size[MAX_DIMS] = {0}, stride[MAX_DIMS] = {1, 1, 1};
    int                dims = 1;
    AtenTensorHandle   handle = NULL;

    if (box->failed) return none;
    if (wanted) {
        for (dims = 0; dims < leading; dims++) size[dims] = sizes[dims];
        if (width) size[dims++] = *width;
    }
    if (!row_major(dims, size, stride) ||
        aoti_torch_empty_strided(dims, size, stride, code_of(dtype), DEVICE_TYPE, box->ctx.device, &handle)) {
        fail(box, "out of memory for %s", name);
        return none;
    }
    box->result[box->results++] = handle;
    if (!wanted) return none;
    if (torch_get_mutable_data_ptr(handle, &output.data)) {
        fail(box, "%s has no data", name);
        return none;
    }
    for (int d = 0; d < leading; d++) output.rows *= size[d];
    if (width) output.cols = size[leading];
    output.row_stride = stride[leading - 1];
    output.set_stride = leading == 2 ? stride[0] : 0;
    return output;
}

muvox_output box_new_rows(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int64_t width)
{
    int64_t   size[2];
    const int leading = leading_sizes(box, size);

    return pack(box, name, wanted, dtype, leading, size, &width);
}

muvox_output box_new_column(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype)
{
    int64_t   size[2];
    const int leading = leading_sizes(box, size);

    return pack(box, name, wanted, dtype, leading, size, NULL);
}

muvox_output box_new_per_set(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int64_t width)
{
    return pack(box, name, wanted, dtype, 1, &box->sets.count, &width);
}

muvox_output box_new_list(muvox_box *box, const char *name, muvox_dtype dtype, int64_t rows)
{
    return pack(box, name, true, dtype, 1, &rows, NULL);
}

muvox_output box_new_table(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int64_t rows,
                           int64_t width)
{
    return pack(box, name, wanted, dtype, 1, &rows, &width);
}
