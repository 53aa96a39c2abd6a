"use strict";
// The page itself: runs, views, keys, theme, and staying up to date while a run goes on.
(function (R) {
  const KEYS = { "1 – 5": "views", "j k, ↓ ↑": "next and previous completion", Enter: "its group, side by side", "n p": "next and previous page",
    "/": "search", "← →": "in a group's tokens: their values", Esc: "close", t: "light or dark", "?": "this list" };
  R.state = { runs: [], hidden: new Set(), metrics: [], smoothing: 0.6, metricFilter: "", allMetrics: false, differences: true, view: "curves",
    spread: { column: "reward" }, completions: { run: 0, query: { sort: "-step", mode: "train" }, offset: 0, group: null, color: "" } };
  R.version = 0;
  R.shown = () => R.state.runs.filter((run) => !R.state.hidden.has(run.run));
  R.fail = (box, error) => box.append(R.el("p", { class: "error" }, error.message));
  const main = document.getElementById("main"), tabs = document.getElementById("tabs");

  R.render = function () {
    R.version += 1;
    document.getElementById("tip").hidden = true;
    [...tabs.children].forEach((tab) => tab.setAttribute("aria-selected", String(tab.dataset.view === R.state.view)));
    main.replaceChildren();
    Promise.resolve(R.views[R.state.view].show(main)).catch((error) => R.fail(main, error)).then(() => { main.dataset.ready = R.state.view; });
  };

  function go(view) {
    if (!R.views[view]) return;
    R.state.view = view;
    if (location.hash !== `#${view}`) history.replaceState(null, "", `#${view}`);
    R.render();
  }

  // -- the head

  function head() {
    const { runs, hidden } = R.state;
    document.getElementById("runs").replaceChildren(...runs.map((run) => {
      const chip = R.el("button", { type: "button", class: "chip", "aria-pressed": String(!hidden.has(run.run)), onclick: () => {
        if (hidden.has(run.run)) hidden.delete(run.run); else if (runs.length > 1) hidden.add(run.run);
        head();
        R.render();
      } }, R.el("i", {}), R.visible(run.name));
      chip.firstChild.style.backgroundColor = R.color(run.run);
      return chip;
    }));
    document.getElementById("status").textContent = runs.map((run) => {
      const steps = run.max_steps ? `update ${R.number(run.step)} of ${R.number(run.max_steps)}` : `update ${R.number(run.step)}`;
      return (R.source.live && run.live && run.step < (run.max_steps || Infinity) ? "live, " : "") + steps;
    }).join(" · ");
    const only = runs.length === 1 ? `${R.visible(runs[0].name)} – ` : "";
    document.title = `${only}rloom show`;
  }

  function theme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    try { localStorage.setItem("rloom-theme", dark ? "dark" : "light"); } catch { /* a file may have no storage */ }
    head();
    R.render();
  }
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  // -- staying up to date

  function extend(known, more) {
    const count = known.steps.length;
    known.steps.push(...more.steps);
    for (const name of new Set([...Object.keys(known.series), ...Object.keys(more.series)])) {
      const before = known.series[name] || new Array(count).fill(null);
      known.series[name] = before.concat(more.series[name] || new Array(more.steps.length).fill(null));
    }
    Object.assign(known.meanings, more.meanings);
    known.logs = more.logs;
  }

  async function load(run) {
    const known = R.state.metrics[run.run];
    if (known && known.generation === run.generation && known.logs === run.logs) return false;
    const anew = !known || known.generation !== run.generation || known.every > 1 || run.logs < known.logs;
    const found = await R.source.metrics(run.run, anew ? 0 : known.logs);
    if (anew || found.generation !== known.generation) R.state.metrics[run.run] = anew ? found : await R.source.metrics(run.run, 0);
    else extend(known, found);
    return true;
  }

  // Does nothing while somebody types, so that no field loses what was typed into it.
  async function look() {
    try {
      const before = R.state.runs;
      const runs = await R.source.runs();
      const changed = (await Promise.all(runs.map(load))).some(Boolean);
      R.state.runs = runs;
      document.body.classList.remove("gone");
      head();
      const first = before.length === 0, more = !first && runs.some((run, i) => run.rows !== before[i].rows || run.share !== before[i].share);
      const typing = /^(INPUT|SELECT)$/.test(document.activeElement.tagName) && main.contains(document.activeElement);
      const hadNone = !first && runs.some((run, i) => Boolean(run.rows) !== Boolean(before[i].rows));
      if (first || (hadNone && R.state.view === "completions")) R.render();
      else if (changed && !typing && (R.state.view === "curves" || R.state.view === "time")) R.render();
      else if (more && R.views[R.state.view].update) R.views[R.state.view].update();
    } catch (error) {
      document.body.classList.add("gone");
      document.getElementById("status").textContent = "the server is gone: what is here stays";
      if (!R.state.runs.length) R.fail(main, error);
    }
    const live = R.state.runs.some((run) => run.live || !run.complete);
    if (R.source.live) setTimeout(look, live ? 2000 : 10000);
  }

  // -- keys

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing && event.key === "Escape") event.target.blur();
    if (typing || document.getElementById("keys").open) return;
    const views = Object.keys(R.views), own = R.views[R.state.view].key;
    if (event.key >= "1" && event.key <= String(views.length)) go(views[event.key - 1]);
    else if (event.key === "t") theme(!isDark());
    else if (event.key === "?") document.getElementById("keys").showModal();
    else if (!own || !own(event)) return;
    event.preventDefault();
  });

  // -- the beginning

  try { const kept = localStorage.getItem("rloom-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* see above */ }
  R.views = Object.fromEntries(["curves", "completions", "distributions", "time", "config"].map((name) => [name, R.views[name]]));
  tabs.append(...Object.entries(R.views).map(([name, view], i) => R.el("button", { type: "button", role: "tab", "data-view": name, title: `key ${i + 1}`, onclick: () => go(name) }, view.title)));
  document.getElementById("keylist").append(...Object.entries(KEYS).flatMap(([key, what]) => [R.el("dt", {}, key), R.el("dd", {}, what)]));
  document.getElementById("theme").addEventListener("click", () => theme(!isDark()));
  document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
  addEventListener("hashchange", () => go(location.hash.slice(1)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", R.render);
  if (R.views[location.hash.slice(1)]) R.state.view = location.hash.slice(1);
  look();
})(window.Rloom);
