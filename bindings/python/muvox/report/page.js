"use strict";
// Draws a report from the JSON beside it. Arrays are (x, y, z) with z fastest, as in a scan file.
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const [nx, ny, nz] = data.grid.shape;
const voxels = nx * ny * nz;
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
for (const map of data.maps) map.values = new Uint16Array(bytes(map.data));
const block = data.block === null ? null : new Uint8Array(bytes(data.block));
const truth = data.maps.find((map) => map.name === "Truth");
const edges = (axis) =>
  Array.from({ length: data.grid.shape[axis] + 1 }, (_, i) => data.grid.origin[axis] + i * data.grid.size[axis]);
const corners = [0, 1, 2].map(edges);
const centres = corners.map((list) => list.slice(1).map((edge, i) => (edge + list[i]) / 2));
const colours = ["#7f7f7f", "#9ecae1", "#3182bd", "#fdae6b", "#e6550d", "#d62728"];
const config = { displayModeBar: false, responsive: true };
const font = { family: "system-ui, DejaVu Sans, sans-serif", size: 12 };
const state = { volume: 0, level: 0, slices: "all", space: "all", voxels: 1 };

const at = (i, j, k) => (i * ny + j) * nz + k;
const value = (map, voxel) => map.low + map.step * map.values[state.volume * voxels + voxel];
const isBlock = (voxel) => block !== null && block[state.volume * voxels + voxel] === 1;
const blockVoxels = (volume) =>
  block === null ? 0 : block.subarray(volume * voxels, (volume + 1) * voxels).reduce((a, b) => a + b, 0);
const length = (logarithm) => `${(100 * Math.exp(logarithm)).toPrecision(3)} cm`;
const number = (x, digits = 3) => (x === null || x === undefined ? "–" : x.toFixed(digits));

// Truth, the better map of each classical kind, and the network.
function best() {
  const chosen = truth ? [truth] : [];
  for (const kind of ["PoCA", "ASR"]) {
    const maps = data.maps.filter((map) => map.name.startsWith(kind));
    if (maps.length) chosen.push(maps.reduce((a, b) => ((b.auc ?? 1) >= (a.auc ?? 1) ? b : a)));
  }
  return [...chosen, data.maps.at(-1)];
}
const above = { xref: "paper", yref: "paper", xanchor: "center", yanchor: "bottom", showarrow: false };
const mapsOf = (choice) => (choice === "all" ? best() : [data.maps[Number(choice)]]);
const heading = (map) => {
  const auc = map.aucs ? map.aucs[state.volume] : null;
  return `<b>${map.name}</b>${auc === null ? "" : `, AUC ${number(auc)}`}`;
};
const colourbar = () => ({
  title: { text: "X₀" }, thickness: 14, len: 0.95,
  tickvals: data.materials.map((m) => Math.log(m.x0)),
  ticktext: data.materials.map((m) => `${m.name}, ${(100 * m.x0).toPrecision(3)} cm`),
});
const scale = { colorscale: data.colours, cmin: data.range[0], cmax: data.range[1] };

function outline() {
  const xs = [], ys = [];
  const there = (i, j) => i >= 0 && j >= 0 && i < nx && j < ny && isBlock(at(i, j, state.level));
  const line = (x0, y0, x1, y1) => { xs.push(x0, x1, null); ys.push(y0, y1, null); };
  for (let i = 0; i <= nx; i++)
    for (let j = 0; j <= ny; j++) {
      const [x, y] = [corners[0][i], corners[1][j]];
      if (j < ny && there(i, j) !== there(i - 1, j)) line(x, y, x, corners[1][j + 1]);
      if (i < nx && there(i, j) !== there(i, j - 1)) line(x, y, corners[0][i + 1], y);
    }
  return { x: xs, y: ys };
}

function drawSlices() {
  const maps = mapsOf(state.slices), traces = [], { x, y } = outline();
  const layout = { font, height: 340, margin: { l: 45, r: 10, t: 34, b: 40 }, annotations: [], showlegend: false };
  maps.forEach((map, place) => {
    const end = place ? place + 1 : "", z = [];
    for (let j = 0; j < ny; j++) z.push(centres[0].map((_, i) => value(map, at(i, j, state.level))));
    const shared = { xaxis: `x${end}`, yaxis: `y${end}` };
    traces.push({
      type: "heatmap", name: map.name, x: centres[0], y: centres[1], z, text: z.map((row) => row.map(length)),
      hovertemplate: "x %{x:.2f} m, y %{y:.2f} m<br>X₀ %{text}", xgap: 1, ygap: 1,
      colorscale: scale.colorscale, zmin: scale.cmin, zmax: scale.cmax,
      showscale: place === maps.length - 1, colorbar: colourbar(), ...shared,
    });
    traces.push({
      type: "scatter", mode: "lines", name: "outline", x, y, line: { color: "#00e5ff", width: 2.5 }, hoverinfo: "skip",
      ...shared,
    });
    const width = 1 / maps.length, gap = maps.length > 1 ? 0.035 : 0;
    const domain = [place * width + gap / 2, (place + 1) * width - gap / 2];
    layout[`xaxis${end}`] = {
      domain, title: { text: "x, m" }, constrain: "domain", zeroline: false, anchor: `y${end}`,
    };
    layout[`yaxis${end}`] = {
      title: { text: place ? "" : "y, m" }, scaleanchor: `x${end}`, constrain: "domain", zeroline: false,
      anchor: `x${end}`,
    };
    layout.annotations.push({
      text: heading(map), x: (domain[0] + domain[1]) / 2, y: 1.02, ...above,
    });
  });
  return Plotly.react("slices", traces, layout, config);
}

// The faces between chosen voxels and others, as two triangles each.
function cubes(map) {
  const chosen = new Uint8Array(voxels);
  if (map === truth && block !== null) for (let v = 0; v < voxels; v++) chosen[v] = isBlock(v) ? 1 : 0;
  else {
    const order = Array.from({ length: voxels }, (_, v) => v).sort((a, b) => value(map, a) - value(map, b) || a - b);
    const flat = value(map, order[0]) === value(map, order.at(-1));
    for (const v of flat ? [] : order.slice(0, state.voxels)) chosen[v] = 1;
  }
  const mesh = { x: [], y: [], z: [], i: [], j: [], k: [], intensity: [], text: [], count: 0 };
  const size = [nx, ny, nz];
  for (let v = 0; v < voxels; v++) {
    if (!chosen[v]) continue;
    mesh.count++;
    const index = [Math.floor(v / (ny * nz)), Math.floor(v / nz) % ny, v % nz];
    for (let axis = 0; axis < 3; axis++)
      for (const side of [0, 1]) {
        const next = [...index];
        next[axis] += side ? 1 : -1;
        if (next[axis] >= 0 && next[axis] < size[axis] && chosen[at(...next)]) continue;
        const first = mesh.x.length;
        for (const [p, q] of [[0, 0], [1, 0], [1, 1], [0, 1]]) {
          const corner = [...index];
          corner[axis] += side;
          corner[(axis + 1) % 3] += p;
          corner[(axis + 2) % 3] += q;
          mesh.x.push(corners[0][corner[0]]);
          mesh.y.push(corners[1][corner[1]]);
          mesh.z.push(corners[2][corner[2]]);
          mesh.text.push(length(value(map, v)));
        }
        mesh.i.push(first, first);
        mesh.j.push(first + 1, first + 2);
        mesh.k.push(first + 2, first + 3);
        mesh.intensity.push(value(map, v), value(map, v));
      }
  }
  return mesh;
}

function drawSpace() {
  const maps = mapsOf(state.space), traces = [];
  const layout = { font, height: 400, margin: { l: 0, r: 10, t: 34, b: 0 }, annotations: [], uirevision: "kept" };
  const range = (axis) => [corners[axis][0], corners[axis].at(-1)];
  maps.forEach((map, place) => {
    const scene = `scene${place ? place + 1 : ""}`, { count, ...mesh } = cubes(map);
    const axis = (name, which) => ({
      title: { text: name }, range: range(which), nticks: 4, backgroundcolor: "#f4f5f8", showbackground: true,
    });
    traces.push({
      type: "mesh3d", name: map.name, scene, ...mesh, intensitymode: "cell", flatshading: true, ...scale, meta: count,
      lighting: { ambient: 0.75, diffuse: 0.5, specular: 0.05 },
      hovertemplate: "x %{x:.2f}, y %{y:.2f}, z %{z:.2f} m<br>X₀ %{text}",
      showscale: place === maps.length - 1, colorbar: colourbar(),
    });
    const domain = { x: [place / maps.length, (place + 1) / maps.length], y: [0, 1] };
    layout[scene] = {
      domain, xaxis: axis("x", 0), yaxis: axis("y", 1), zaxis: axis("z", 2), aspectmode: "data",
      camera: { eye: { x: 1.55, y: -1.9, z: 1.1 }, center: { x: 0, y: 0, z: -0.12 } }, uirevision: "kept",
    };
    layout.annotations.push({
      text: heading(map), x: (domain.x[0] + domain.x[1]) / 2, y: 1, ...above,
    });
  });
  return Plotly.react("space", traces, layout, config);
}

function drawRoc() {
  const traces = data.maps.filter((map) => map.curve).map((map) => ({
    type: "scatter", mode: "lines", x: map.curve[0], y: map.curve[1], name: `${map.name}, AUC ${number(map.auc)}`,
    line: { color: colours[data.maps.indexOf(map) + (truth ? 0 : 1)], width: map.name === "VoxelNet" ? 3.5 : 1.8 },
  }));
  if (!traces.length)
    return nothing("roc", truth ? "No block voxels to find." : "The scan has no truth to compare with.");
  traces.push({
    type: "scatter", mode: "lines", x: [0, 1], y: [0, 1], line: { color: "#bbb", dash: "dot" }, hoverinfo: "skip",
    showlegend: false,
  });
  return Plotly.react("roc", traces, {
    font, height: 360, margin: { l: 50, r: 10, t: 10, b: 45 },
    legend: { x: 0.98, y: 0.02, xanchor: "right", yanchor: "bottom" },
    xaxis: { title: { text: "background voxels taken for blocks" }, range: [0, 1] },
    yaxis: { title: { text: "block voxels found" }, range: [0, 1.01] },
  }, config);
}

function drawLoss() {
  if (data.loss === null) return nothing("loss", "Neither the checkpoint nor a log.csv beside it has a history.");
  const { step, loss, window: width, validation } = data.loss;
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const mean = loss.map((_, i) => (i + 1 < width ? null : sum(loss.slice(i + 1 - width, i + 1)) / width));
  const shown = loss.filter((x) => x !== null).sort((a, b) => a - b);
  const line = { type: "scatter", mode: "lines" };
  const points = { type: "scatter", mode: "lines+markers", x: validation.map((entry) => entry.step) };
  return Plotly.react("loss", [
    { ...line, name: "loss, step by step", x: step, y: loss, line: { color: "#cfd3dc", width: 1 } },
    { ...line, name: "loss, running mean", x: step, y: mean, line: { color: "#3182bd", width: 2.2 } },
    { ...points, name: "loss, validation", y: validation.map((entry) => entry.loss ?? null),
      line: { color: "#d62728" } },
    { ...points, name: "block AUC, validation", y: validation.map((entry) => entry.auc ?? null), yaxis: "y2",
      line: { color: "#2ca02c", dash: "dot" } },
  ], {
    font, height: 360, margin: { l: 55, r: 50, t: 50, b: 45 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    xaxis: { title: { text: "step" } },
    yaxis: {
      title: { text: "loss" },
      range: [Math.min(0, shown[0]), 1.1 * shown[Math.floor(0.98 * (shown.length - 1))]],
    },
    yaxis2: { title: { text: "AUC" }, overlaying: "y", side: "right", range: [0.4, 1.01], dtick: 0.1, showgrid: false },
  }, config);
}

function nothing(id, text) {
  element(id).textContent = text;
  return Promise.resolve();
}

function table(id, head, rows) {
  const target = element(id);
  for (const [place, row] of [...(head ? [head] : []), ...rows].entries()) {
    const line = target.insertRow();
    row.forEach((text, column) => {
      const cell = document.createElement((head && place === 0) || column === 0 ? "th" : "td");
      if (head && column) cell.className = "number";
      cell.textContent = text;
      line.append(cell);
    });
  }
}

function describe() {
  const { id, muons, background } = data.volumes[state.volume];
  const blocks = block === null ? "" : `, ${blockVoxels(state.volume)} block voxels in ${background}`;
  element("about").textContent = `volume_id ${id}: ${muons} muons${blocks}`;
  element("level").value = state.level;
  element("level-value").textContent = `z = ${centres[2][state.level].toFixed(2)} m`;
  element("share").value = Math.round(100 * Math.sqrt(state.voxels / voxels));
  element("share-value").textContent = `${state.voxels} of ${voxels}`;
  element("volume").value = state.volume;
}

// The last request wins; "drawn" is said when nothing more is to come.
let asked = 0;
async function draw(...parts) {
  const turn = ++asked;
  document.body.dataset.state = "drawing";
  describe();
  for (const part of parts) await part();
  if (turn === asked) document.body.dataset.state = "drawn";
}

function chooseVolume(volume) {
  state.volume = volume;
  const perLevel = Array.from({ length: nz }, (_, k) => {
    let count = 0;
    for (let column = 0; column < nx * ny; column++) count += isBlock(column * nz + k) ? 1 : 0;
    return count;
  });
  const most = Math.max(...perLevel);
  state.level = most ? perLevel.indexOf(most) : Math.floor(nz / 2);
  const blocks = perLevel.reduce((a, b) => a + b, 0);
  state.voxels = blocks || Math.max(1, Math.round(0.05 * voxels));
}

function start() {
  for (const id of ["slice-method", "space-method"]) {
    element(id).add(new Option(`${best().map((map) => map.name.split(",")[0]).join(", ")} side by side`, "all"));
    data.maps.forEach((map, place) => element(id).add(new Option(map.name, place)));
  }
  data.volumes.forEach((v, place) => element("volume").add(new Option(`${v.number}`, place)));
  element("level").max = nz - 1;
  const more = data.total > data.volumes.length ? `, the first ${data.volumes.length} shown` : "";
  element("what").textContent = `${data.title}: ${data.total} volumes${more} of ${nx} × ${ny} × ${nz} voxels`;
  if (!truth) document.querySelectorAll(".truth").forEach((part) => part.remove());
  const aucs = Object.fromEntries(data.maps.map((map) => [map.name, number(map.auc)]));
  const times = data.times.map(([name, time, memory]) => [name, aucs[name], time, memory]);
  table("times", ["method", "block AUC", "time of a volume", "peak memory"], times);
  table("facts", null, data.facts);
  const left = Object.entries(data.leftOut).map(([name, columns]) => `${name} left out: the scan has no ${columns}.`);
  element("left-out").textContent = [data.peak, ...left].join(" ");
  const volume = (step) => () => {
    chooseVolume((state.volume + step + data.volumes.length) % data.volumes.length);
    draw(drawSlices, drawSpace);
  };
  element("previous").onclick = volume(-1);
  element("next").onclick = volume(1);
  element("volume").onchange = (event) => { chooseVolume(Number(event.target.value)); draw(drawSlices, drawSpace); };
  element("slice-method").onchange = (event) => { state.slices = event.target.value; draw(drawSlices); };
  element("space-method").onchange = (event) => { state.space = event.target.value; draw(drawSpace); };
  element("level").oninput = (event) => { state.level = Number(event.target.value); draw(drawSlices); };
  element("share").oninput = (event) => {
    state.voxels = Math.max(1, Math.round(voxels * (Number(event.target.value) / 100) ** 2));
    draw(drawSpace);
  };
  const seen = data.volumes.map((_, volume) => blockVoxels(volume));
  chooseVolume(Math.max(0, seen.indexOf(Math.max(...seen))));
  draw(drawSlices, drawSpace, drawRoc, drawLoss);
}
start();
