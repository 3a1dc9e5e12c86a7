"use strict";
(() => {
const $ = id => document.getElementById(id);

// ---- What is told where the mouse, or the focus, rests
const tip = $("tip");
function tell(words, x, y) {
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
function takeTitles(root) { // a <title>'s own tooltip comes late and can't be styled
  for (const title of root.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    if (title.parentNode.hasAttribute("tabindex")) title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  }
}
document.addEventListener("mousemove", event => {
  if (event.target.tagName === "CANVAS") return;
  const over = event.target.closest?.("[data-tip]");
  tell(over && over.dataset.tip, event.clientX, event.clientY);
});
document.addEventListener("focusin", event => {
  const words = event.target.dataset?.tip;
  if (!words) return;
  const box = event.target.getBoundingClientRect();
  tell(words, box.right, box.bottom);
});
document.addEventListener("focusout", () => tell(""));

// ---- Tables
function valueOf(row, column) {
  const cell = row.cells[column];
  if (!("v" in cell.dataset)) return cell.classList.contains("number") ? Number(cell.textContent) : cell.textContent;
  return cell.dataset.v === "" ? null : Number(cell.dataset.v);
}
function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}
function sort(heading) {
  const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...body.rows].map(row => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : compare(a, b) * (down ? -1 : 1)));
  body.append(...rows.map(([, row]) => row));
}
for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}
$("filter")?.addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const rows = [...$("rejected").tBodies[0].rows];
  const told = row => (row.cells[0].textContent + " " + row.cells[1].textContent).toLowerCase();
  for (const row of rows) row.hidden = !words.every(word => told(row).includes(word));
  const shown = rows.filter(row => !row.hidden).length;
  $("filter-says").textContent = `${shown} of ${rows.length} shown`;
});

// ---- The configuration
$("copy")?.addEventListener("click", async () => {
  const text = $("config").textContent;
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or an old browser on a file: select it, and let the browser copy that
    getSelection().selectAllChildren($("config"));
    copied = document.execCommand("copy");
  }
  $("copy-says").textContent = copied ? "Copied." : "Selected: press Ctrl + C.";
});

// ---- One layout's memory and time
let details = null;
function select(row) {
  if (!row || !details) return;
  for (const other of $("ranking").tBodies[0].rows) {
    other.classList.toggle("selected", other === row);
    other.querySelector(".pick").setAttribute("aria-pressed", other === row);
  }
  $("layout").innerHTML = details[row.dataset.index];
  takeTitles($("layout"));
}
$("ranking")?.tBodies[0].addEventListener("click", event => select(event.target.closest("tr")));
function selectPoint(event) {
  const point = event.target.closest?.("[data-layout]");
  if (!point || !$("ranking")) return;
  select([...$("ranking").tBodies[0].rows].find(row => row.dataset.layout === point.dataset.layout));
}
for (const svg of document.querySelectorAll(".chart svg")) {
  svg.addEventListener("click", selectPoint);
  svg.addEventListener("keydown", event => event.key === "Enter" && selectPoint(event));
}

// ---- The timeline
const LEFT = 74, TOP = 6, AXIS = 24, MARK = 4;
function timeline(id, data) {
  const canvas = $(id), shown = canvas.getContext("2d");
  // What a move of the mouse doesn't change is drawn once, aside.
  const aside = document.createElement("canvas"), pen = aside.getContext("2d");
  const lanes = data.lanes.map(unpack);
  const rows = Math.max(0, ...data.ops.map(op => op.row === null ? 0 : op.row + 1));
  const thin = lanes.length > 24;
  const box = thin ? Math.max(5, Math.floor(560 / lanes.length)) : 24;
  const marks = thin ? Math.min(rows, 1) * 3 : rows * MARK + (rows ? 2 : 0);
  const lane = box + marks + (thin ? 1 : 6), height = TOP + lane * lanes.length + AXIS;
  let from = 0, to = data.ticks, cursor = null;

  function unpack(columns) {
    const n = columns.start.length, start = new Float64Array(n), end = new Float64Array(n);
    const boxes = [], others = [];
    for (let i = 0, at = 0; i < n; i++) {
      start[i] = at += columns.start[i];
      end[i] = at + columns.length[i];
      (data.ops[columns.op[i]].row === null ? boxes : others).push(i);
    }
    return { ...columns, start, end, boxes, others };
  }
  const width = () => canvas.clientWidth - LEFT - 8;
  const x = tick => LEFT + (tick - from) / (to - from) * width();
  const tickAt = pixel => from + (pixel - LEFT) / width() * (to - from);
  const name = (l, i) => data.ops[l.op[i]].short + l.micro[i] + "@" + l.chunk[i] + (l.bucket[i] < 0 ? "" : "#" + l.bucket[i]);
  const colour = (l, i) => {
    const colours = data.ops[l.op[i]].colours;
    return colours[colours.length > 1 ? data.shades[l.chunk[i]] : 0];
  };
  const parsed = new Map();
  const rgb = hex => {
    if (!parsed.has(hex)) parsed.set(hex, [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)));
    return parsed.get(hex);
  };
  const inkOn = hex => {
    const [red, green, blue] = rgb(hex);
    return 0.299 * red + 0.587 * green + 0.114 * blue < 160 ? "#ffffff" : "#10151b";
  };
  function seconds(ticks, scale = ticks) {
    const unit = data.seconds / data.ticks, full = Math.abs(scale * unit);
    const [size, word] = full >= 1 ? [1, "s"] : full >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    return Number((ticks * unit / size).toPrecision(5)) + " " + word;
  }
  function words(stage, i) {
    const l = lanes[stage];
    return `${name(l, i)} ${data.ops[l.op[i]].name}\nstage ${stage}, chunk ${l.chunk[i]}, micro-batch ${l.micro[i]}\n` +
      `${seconds(l.start[i])} to ${seconds(l.end[i])} (${seconds(l.end[i] - l.start[i])})`;
  }
  function first(l, list, tick) { // of the list, sorted and without overlap, the first that ends after the tick
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (l.end[list[middle]] > tick) high = middle; else low = middle + 1;
    }
    return low;
  }

  function draw() {
    const dense = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    aside.width = canvas.width = canvas.clientWidth * dense;
    aside.height = canvas.height = height * dense;
    pen.scale(dense, dense);
    pen.textBaseline = "middle";
    const ticks = drawGrid();
    lanes.forEach((l, stage) => drawLane(l, stage));
    if (data.left_out) drawGap();
    pen.clearRect(0, 0, LEFT - 1, height);
    drawTimes(ticks);
    pen.fillStyle = paint("ink");
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "right";
    const every = Math.ceil(14 / lane);
    for (let stage = 0; stage < lanes.length; stage += every) {
      pen.fillText("stage " + stage, LEFT - 10, TOP + stage * lane + Math.min(box, lane * every) / 2);
    }
    present();
  }
  const paint = word => getComputedStyle(document.documentElement).getPropertyValue("--" + word).trim();
  function present() { // what is drawn aside, and the cursor on it
    shown.setTransform(1, 0, 0, 1, 0, 0);
    shown.clearRect(0, 0, canvas.width, canvas.height);
    if (aside.width) shown.drawImage(aside, 0, 0);
    shown.scale(canvas.width / canvas.clientWidth, canvas.width / canvas.clientWidth);
    if (cursor) drawCursor();
  }
  function drawLane(l, stage) {
    const y = TOP + stage * lane;
    drawRow(l, l.boxes, y, box);
    if (thin) drawRow(l, l.others, markTop(l, null, y), 2);
    else for (let row = 0; row < rows; row++) {
      const own = l.others.filter(i => data.ops[l.op[i]].row === row);
      if (own.length) drawRow(l, own, markTop(l, own[0], y), MARK - 1);
    }
  }
  function drawRow(l, list, y, high) {
    const visible = list.filter(i => l.end[i] > from && l.start[i] < to && l.end[i] > l.start[i]);
    if (visible.length > width() / 2) return drawBlended(l, visible, y, high);
    pen.textAlign = "center";
    pen.font = "11px system-ui, sans-serif";
    for (const i of visible) {
      const a = x(l.start[i]), b = x(l.end[i]), label = String(l.micro[i]);
      pen.fillStyle = colour(l, i);
      pen.fillRect(a, y, Math.max(b - a - (b - a > 3 && high > MARK ? 0.8 : 0), 0.6), high);
      if (high < 12 || b - a < 7 * label.length + 4) continue;
      pen.fillStyle = inkOn(colour(l, i));
      pen.fillText(label, (Math.max(a, LEFT) + Math.min(b, canvas.clientWidth)) / 2, y + high / 2 + 0.5);
    }
  }
  function drawBlended(l, visible, y, high) { // where boxes are narrower than pixels, each pixel is the mean of its boxes
    const n = Math.round(width() * (window.devicePixelRatio || 1)), sums = new Float32Array(4 * n), scale = n / (to - from);
    for (const i of visible) {
      const a = Math.max((l.start[i] - from) * scale, 0), b = Math.min((l.end[i] - from) * scale, n);
      const [red, green, blue] = rgb(colour(l, i));
      for (let p = Math.floor(a); p < b; p++) {
        const part = Math.min(b, p + 1) - Math.max(a, p);
        sums[4 * p] += part * red;
        sums[4 * p + 1] += part * green;
        sums[4 * p + 2] += part * blue;
        sums[4 * p + 3] += part;
      }
    }
    const image = new ImageData(n, 1);
    for (let p = 0; p < n; p++) {
      for (let k = 0; k < 3; k++) image.data[4 * p + k] = sums[4 * p + k] / (sums[4 * p + 3] || 1);
      image.data[4 * p + 3] = 255 * Math.min(sums[4 * p + 3], 1);
    }
    const strip = document.createElement("canvas");
    strip.width = n;
    strip.height = 1;
    strip.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(strip, LEFT, y, width(), high);
  }
  const markTop = (l, i, y) => y + box + (thin ? 0 : 2 + MARK * data.ops[l.op[i]].row);
  function drawGap() {
    const [a, b, n] = data.left_out, left = Math.max(x(a), LEFT), wide = Math.min(x(b), canvas.clientWidth) - left;
    if (wide <= 0) return;
    pen.globalAlpha = 0.9;
    pen.fillStyle = paint("panel");
    pen.fillRect(left, 0, wide, height - AXIS);
    pen.globalAlpha = 1;
    pen.fillStyle = paint("ink");
    pen.font = "13px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillText(n.toLocaleString("en") + " instructions left out", left + wide / 2, (height - AXIS) / 2);
  }
  function drawGrid() {
    pen.fillStyle = paint("lane");
    for (let stage = 0; stage < lanes.length; stage++) pen.fillRect(x(0), TOP + stage * lane, x(data.ticks) - x(0), box);
    const rough = (to - from) / 8 * data.seconds, power = 10 ** Math.floor(Math.log10(rough / data.ticks));
    const step = power * [1, 2, 5, 10].find(k => k * power >= rough / data.ticks * 0.999) / data.seconds * data.ticks;
    const ticks = [];
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) ticks.push(tick);
    pen.fillStyle = paint("line");
    for (const tick of ticks) pen.fillRect(x(tick), 0, 1, height - AXIS + 4);
    return ticks;
  }
  function drawTimes(ticks) {
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillStyle = paint("faint");
    for (const tick of ticks) pen.fillText(seconds(tick, to), Math.min(x(tick), canvas.clientWidth - 24), height - 9);
  }
  function drawCursor() {
    const [stage, i] = cursor, l = lanes[stage], a = x(l.start[i]), y = TOP + stage * lane;
    const mark = data.ops[l.op[i]].row !== null;
    shown.strokeStyle = paint("ink");
    shown.lineWidth = 2;
    shown.strokeRect(a, mark ? markTop(l, i, y) - 1 : y + 1, Math.max(x(l.end[i]) - a, 2), mark ? MARK : box - 2);
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }
  function show(a, b) { // no further than the step, no closer than 500 ticks
    const span = Math.min(Math.max(b - a, 500), data.ticks);
    from = Math.min(Math.max(a, 0), data.ticks - span);
    to = from + span;
    redraw();
  }
  const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
  function hit(px, py) {
    py -= TOP;
    const stage = Math.floor(py / lane), l = lanes[stage], tick = tickAt(px);
    if (!l || px < LEFT) return null;
    const below = py - stage * lane - box;
    if (below >= 0) {
      const slack = (to - from) / width() * 2, row = thin ? null : Math.floor((below - 2) / MARK);
      const i = l.others.findLast(k => l.start[k] - slack <= tick && tick <= l.end[k] + slack && l.end[k] > l.start[k] &&
        (row === null || data.ops[l.op[k]].row === row));
      return i === undefined ? null : [stage, i];
    }
    const k = first(l, l.boxes, tick);
    return k < l.boxes.length && l.start[l.boxes[k]] <= tick ? [stage, l.boxes[k]] : null;
  }
  function mark(found) {
    const changed = String(found) !== String(cursor);
    cursor = found;
    if (changed) present();
  }

  let drag = null;
  canvas.addEventListener("pointerdown", event => {
    drag = { x: event.offsetX, from, to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", event => {
    if (drag) {
      const moved = (event.offsetX - drag.x) / width() * (drag.to - drag.from);
      tell("");
      show(drag.from - moved, drag.to - moved);
      return;
    }
    const found = hit(event.offsetX, event.offsetY);
    mark(found);
    tell(found && words(...found), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => { tell(""); mark(null); });
  canvas.addEventListener("wheel", event => {
    if (event.ctrlKey) zoom(Math.exp(event.deltaY * 0.002), tickAt(event.offsetX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const moved = (event.deltaX || event.deltaY) / width() * (to - from);
      show(from + moved, to + moved);
    } else return;
    event.preventDefault();
  }, { passive: false });
  const middle = () => cursor ? (lanes[cursor[0]].start[cursor[1]] + lanes[cursor[0]].end[cursor[1]]) / 2 : (from + to) / 2;
  const zoomIn = () => zoom(0.5, middle()), zoomOut = () => zoom(2, middle()), all = () => show(0, data.ticks);
  $(id + "-zoom-in").addEventListener("click", zoomIn);
  $(id + "-zoom-out").addEventListener("click", zoomOut);
  $(id + "-zoom-all").addEventListener("click", all);

  function step(stages, instructions) {
    let [stage, i] = cursor ?? [0, lanes[0].boxes[0]];
    const l = lanes[stage];
    if (cursor && stages) {
      const next = Math.min(Math.max(stage + stages, 0), lanes.length - 1), boxes = lanes[next].boxes;
      i = boxes[Math.min(first(lanes[next], boxes, l.start[i]), boxes.length - 1)];
      stage = next;
    } else if (cursor) {
      const k = first(l, l.boxes, (l.start[i] + l.end[i]) / 2);
      i = l.boxes[Math.min(Math.max(k + instructions, 0), l.boxes.length - 1)];
    }
    if (i === undefined) return;
    const at = lanes[stage];
    if (at.start[i] < from || at.end[i] > to) show(at.start[i] - (to - from) / 2, at.start[i] + (to - from) / 2);
    mark([stage, i]);
    $(id + "-says").textContent = words(stage, i).replaceAll("\n", "; ");
  }
  const keys = {
    ArrowLeft: () => step(0, -1), ArrowRight: () => step(0, 1), ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0),
    "+": zoomIn, "=": zoomIn, "-": zoomOut, "0": all,
  };
  canvas.addEventListener("keydown", event => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    keys[event.key]();
    event.preventDefault();
  });

  const named = new Map(data.ops.map(op => [op.name, op.colours]));
  for (const [word, colours] of named) {
    const entry = document.createElement("span");
    for (const c of colours) entry.appendChild(document.createElement("i")).style.background = c;
    entry.append(word);
    $(id + "-legend").append(entry);
  }
  const note = document.createElement("span");
  note.textContent = "number: micro-batch" + (data.ops.some(op => op.colours.length > 1) ? "; paler: a later chunk of the stage" : "");
  $(id + "-legend").append(note);
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", draw);
  draw();
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));

async function start() {
  takeTitles(document);
  const packed = Uint8Array.from(atob($("data").textContent), letter => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(plain).json();
  details = data.details;
  for (const [id, drawn] of Object.entries(data.timelines)) timeline(id, drawn);
  document.body.dataset.ready = "yes";
}
start();
})();
