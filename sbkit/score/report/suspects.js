"use strict";
const main = document.querySelector("main"), output = document.querySelector("output");
const rows = JSON.parse(main.dataset.rows), cards = [...main.children], kept = "sbkit suspects " + location.pathname;
let stored = {};
try { stored = JSON.parse(localStorage.getItem(kept)) || {}; } catch { /* a browser that keeps nothing */ }
let at = 0;

const show = (i) => {
  const card = cards[i], row = rows[i], input = card.querySelector("input");
  card.dataset.decided = row.decision;
  for (const button of card.querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.decision === row.decision);
  input.hidden = row.decision !== "fix";
  const counts = {};
  for (const each of rows) counts[each.decision] = (counts[each.decision] || 0) + 1;
  output.textContent = Object.entries(counts).map(([name, count]) => name + " " + count).join(" · ");
};
const decide = (i, decision) => {
  const row = rows[i], input = cards[i].querySelector("input");
  row.decision = decision;
  row.fix = decision === "fix" ? input.value : "";
  stored[row.ID] = [row.label, decision, row.fix];
  try { localStorage.setItem(kept, JSON.stringify(stored)); } catch { /* the same */ }
  show(i);
  if (decision === "fix") input.focus();
};
const go = (i) => {
  at = Math.max(0, Math.min(cards.length - 1, i));
  for (const player of document.querySelectorAll("audio")) player.pause();
  cards[at].focus();
  cards[at].scrollIntoView({block: "nearest"});
};
const guarded = (text) => /^'*[=+\-@\t\r]/.test(text) ? "'" + text : text;
const save = () => {
  const fields = JSON.parse(main.dataset.fields);
  const lines = [fields, ...rows.map((row) => fields.map((name) => row[name]))];
  const csv = lines.map((line) => line.map((value) => '"' + guarded(String(value)).replaceAll('"', '""') + '"').join(",") + "\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv], {type: "text/csv"}));
  link.download = "suspects.csv";
  link.click();
};

cards.forEach((card, i) => {
  const before = stored[rows[i].ID], input = card.querySelector("input");
  if (before && before[0] === rows[i].label) {
    [, rows[i].decision, rows[i].fix] = before;
    if (rows[i].fix) input.value = rows[i].fix;
  }
  card.addEventListener("focusin", () => { at = i; });
  for (const button of card.querySelectorAll("button")) button.addEventListener("click", () => decide(i, button.dataset.decision));
  input.addEventListener("input", () => decide(i, "fix"));
  input.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === "Escape") { event.stopPropagation(); go(i); } });
  show(i);
});
document.querySelector("#save").addEventListener("click", save);
if (cards.length) go(0);
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey || !cards.length) return;
  const player = cards[at].querySelector("audio");
  const keys = {
    j: () => go(at + 1), k: () => go(at - 1), s: save, x: () => { decide(at, "drop"); go(at + 1); },
    o: () => { decide(at, "keep"); go(at + 1); }, f: () => decide(at, "fix"),
    " ": () => player && (player.paused ? player.play() : player.pause()),
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
