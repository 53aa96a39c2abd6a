"use strict";
// Where the page has its data from: the server, or what an exported file holds. Also the few helpers that all share.
window.Rloom = window.Rloom || { views: {} };
(function (R) {
  // An element. Strings become text nodes: nothing here, and nothing elsewhere, is parsed as HTML.
  R.el = function (tag, props, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "class") node.className = value;
      else if (name === "value" || name === "checked") node[name] = value;
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((c) => c != null));
    return node;
  };

  // Text with what is not printable spelt out, which could hide or reorder what is read: all control, format and unknown
  // characters, and all spaces but the usual one, as `rloom.printable` has it. Lines and tabs stay.
  R.visible = function (text) {
    return String(text == null ? "" : text).replace(/(?![ \n\t])[\p{C}\p{Z}]/gu, (c) => {
      const code = c.codePointAt(0), [letter, digits] = code > 0xffff ? ["U", 8] : code > 0xff ? ["u", 4] : ["x", 2];
      return c === "\r" ? "\\r" : `\\${letter}${code.toString(16).padStart(digits, "0")}`;
    });
  };

  R.number = function (value, digits = 4) {
    if (value == null || Number.isNaN(value)) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? value.toExponential(Math.max(2, digits - 2)).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(digits)));
  };

  // -- the server

  class LiveSource {
    live = true;
    async get(what, params) {
      const kept = Object.entries(params || {}).filter(([, v]) => v !== "" && v != null && v !== false);
      const answer = await fetch(`api/${what}?${new URLSearchParams(kept)}`);
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error || answer.statusText);
      return found;
    }
    runs() { return this.get("runs").then((found) => found.runs); }
    facts(run) { return this.get("facts", { run }); }
    metrics(run, after) { return this.get("metrics", { run, after }); }
    rows(run, query) { return this.get("rows", { run, ...query }); }
    group(run, step, group, mode) { return this.get("group", { run, step, group, mode }); }
    prompt(run, query) { return this.get("prompt", { run, ...query }); }
    distribution(run, column, query) { return this.get("distribution", { run, column, ...query }); }
  }

  // -- an exported file

  const value = (row, name) =>
    name.startsWith("score:") ? (row.scores || {})[name.slice(6)] : row[name];

  function matches(row, query) {
    for (const [name, wanted] of Object.entries(query)) {
      if (wanted === "" || wanted == null || wanted === false) continue;
      if (name === "mode" || name === "stop_reason") { if (row[name] !== wanted) return false; }
      else if (name === "prompt") { if (row.prompt_id !== wanted) return false; }
      else if (name === "tokens") { if (!row.has_tokens) return false; }
      else if (name === "text") { if (!String(row.completion || "").includes(wanted)) return false; }
      else if (name.endsWith("_min") || name.endsWith("_max")) {
        const number = value(row, name.slice(0, -4));
        if (number == null) return false;
        if (name.endsWith("_min") ? number < Number(wanted) : number > Number(wanted)) return false;
      }
    }
    return true;
  }

  function ordered(rows, sort) {
    const sign = sort.startsWith("-") ? -1 : 1, name = sort.replace(/^-/, "");
    if (name === "step") return sign < 0 ? [...rows].reverse() : rows;
    const known = (row) => (value(row, name) == null ? Infinity : sign * value(row, name));
    return [...rows].sort((a, b) => known(a) - known(b) || 0);
  }

  class FileSource {
    live = false;
    constructor(data) { this.data = data; }
    async runs() { return this.data.runs.map((run) => run.info); }
    async facts(run) { return this.data.runs[run].facts; }
    async metrics(run) { return this.data.runs[run].metrics; }
    async rows(run, query) {
      const all = this.data.runs[run].rows;
      const found = ordered(all.filter((row) => matches(row, query)), query.sort || "-step");
      const offset = Number(query.offset || 0), limit = Number(query.limit || 50);
      return { count: found.length, of: all.length, searched: 1, final: true, share: 1, rows: found.slice(offset, offset + limit), seconds: 0 };
    }
    async group(run, step, group, mode) {
      const same = (row) => row.step === step && row.group === group && row.mode === mode;
      return { step, group, mode, rows: this.data.runs[run].rows.filter(same) };
    }
    async prompt(run, query) {
      const groups = new Map();
      for (const row of this.data.runs[run].rows.filter((row) => matches(row, query))) {
        const key = `${row.step} ${row.group}`;
        if (!groups.has(key)) groups.set(key, { step: row.step, group: row.group, rewards: [] });
        if (row.reward != null) groups.get(key).rewards.push(row.reward);
      }
      const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : null);
      return { groups: [...groups.values()].map((g) => ({
        step: g.step, group: g.group, count: g.rewards.length, mean: mean(g.rewards),
        min: g.rewards.length ? Math.min(...g.rewards) : null, max: g.rewards.length ? Math.max(...g.rewards) : null,
      })) };
    }
    async distribution(run, column) { return this.data.runs[run].distributions[column]; }
  }

  const embedded = document.getElementById("data");
  R.source = embedded ? new FileSource(JSON.parse(embedded.textContent)) : new LiveSource();
})(window.Rloom);
