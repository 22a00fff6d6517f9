"use strict";
// One recording plays at a time; a recording shown twice is in the page once.
const players = [...document.querySelectorAll("audio")];
for (const player of players) {
  if (player.dataset.same) {
    player.src = players.find((other) => other.dataset.clip === player.dataset.same).src;
    player.preload = "metadata";
  }
  player.addEventListener("play", () => players.forEach((other) => other === player || other.pause()));
}

// A pointer or a finger on a curve reads its values.
const PLOT = {left: 44, right: 390, top: 12, bottom: 184};
const make = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
};
const nearest = (sorted, value) => {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] > value) high = middle; else low = middle; }
  return value - sorted[low] < sorted[high] - value ? low : high;
};
const readable = (value) => {
  const size = Math.abs(value);
  return size && size < 0.001 ? value.toExponential(2) : Number(value.toPrecision(4)).toLocaleString("en");
};
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const data = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg"), plot = figure.querySelector(".plot");
  const line = svg.querySelector(".pointer"), marks = svg.querySelector(".marks");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  plot.append(tip);
  const across = (x) => PLOT.left + (x - data.x[0]) / (data.x[1] - data.x[0] || 1) * (PLOT.right - PLOT.left);
  const up = (y) => PLOT.bottom - (y - data.y[0]) / (data.y[1] - data.y[0] || 1) * (PLOT.bottom - PLOT.top);
  const show = (event) => {
    const box = svg.getBoundingClientRect(), scale = 400 / box.width;
    const at = Math.min(PLOT.right, Math.max(PLOT.left, (event.clientX - box.left) * scale));
    const x = data.x[0] + (at - PLOT.left) / (PLOT.right - PLOT.left) * (data.x[1] - data.x[0]);
    marks.replaceChildren();
    const lines = [];
    let where = x;
    for (const series of data.series) {
      const i = nearest(series.x, x);
      where = series.x[i];
      lines.push(series.name + ": " + readable(series.y[i]) + data.unit);
      marks.append(make("circle", {cx: across(where), cy: Math.max(up(series.y[i]), 6), r: 3.5, "class": "dot c" + series.colour}));
    }
    const epoch = data.ticks.find((tick) => tick[0] >= where);
    lines.unshift("step " + Math.round(where).toLocaleString("en") + (epoch ? ", epoch " + epoch[1] : ""));
    line.setAttribute("x1", across(where));
    line.setAttribute("x2", across(where));
    line.style.visibility = "visible";
    tip.replaceChildren(...lines.flatMap((text, i) => i ? [document.createElement("br"), text] : [text]));
    tip.hidden = false;
    const left = across(where) / scale, room = box.width - tip.offsetWidth;
    tip.style.left = Math.max(0, left + 12 > room ? left - tip.offsetWidth - 12 : left + 12) + "px";
  };
  const hide = () => { tip.hidden = true; marks.replaceChildren(); line.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
