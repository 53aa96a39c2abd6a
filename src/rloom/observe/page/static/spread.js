"use strict";
// How rewards, scores, advantages and lengths are spread, and how that changed in training.
(function (R) {
  const LEVELS = ["0.05", "0.25", "0.5", "0.75", "0.95"];

  function quantiles(box, run, found) {
    const color = R.color(run);
    const series = [{ label: "step" }, ...LEVELS.map((q) => ({
      label: q === "0.5" ? "median" : `${Math.round(100 * q)}%`, stroke: color, width: q === "0.5" ? 2 : 1, points: { show: false } }))];
    series.push({ label: "mean", stroke: color, width: 2, dash: [6, 4], points: { show: false } });
    const bands = [{ series: [5, 1], fill: color + "22" }, { series: [4, 2], fill: color + "33" }];
    R.draw(box, { series, bands }, [found.steps, ...LEVELS.map((q) => found.quantiles[q]), found.means], { height: 240 });
  }

  R.views.distributions = {
    title: "Distributions",
    async show(main) {
      const runs = R.shown();
      const scores = [...new Set(runs.flatMap((r) => r.scores))];
      const columns = ["reward", "advantage", "num_tokens", ...scores.map((s) => `score:${s}`)];
      const state = R.state.spread;
      if (!columns.includes(state.column)) state.column = "reward";
      const change = (name) => (event) => { state[name] = event.target.value; R.render(); };
      const field = (name, label) => R.el("label", {}, `${label} `, R.el("input", { type: "number", value: state[name] || "", onchange: change(name) }));
      main.append(R.el("form", { class: "bar", onsubmit: (event) => event.preventDefault() },
        R.el("label", {}, "Of ", R.el("select", { id: "column", onchange: change("column") },
          ...columns.map((c) => R.el("option", { value: c, selected: c === state.column }, R.visible(c.replace("num_tokens", "length")))))),
        ...(R.source.live ? [field("step_min", "From step"), field("step_max", "to")] : [])));
      const version = R.version;
      for (const info of runs) {
        if (!info.rows && R.source.live) continue;
        const query = { mode: info.modes.includes("train") ? "train" : "", step_min: state.step_min, step_max: state.step_max };
        let found;
        try { found = await R.source.distribution(info.run, state.column, query); } catch (error) { R.fail(main, error); continue; }
        if (version !== R.version) return;
        if (!found || !found.count) continue;
        const name = R.visible(info.name), what = state.column.replace("num_tokens", "length");
        const bars = R.el("section", { class: "card" }, R.el("h2", {}, `${name}: ${R.visible(what)}`,
          R.el("span", { class: "last" }, `${R.number(found.mean)} ± ${R.number(found.std)}`)));
        const course = R.el("section", { class: "card" }, R.el("h2", {}, `${name}: through training`));
        main.append(R.el("div", { class: "grid two" }, bars, course));
        R.bars(bars, found.edges, found.counts, what, info.run, { height: 240 });
        quantiles(course, info.run, found);
        bars.append(R.el("p", { class: "quiet" }, `${R.number(found.count)} completions of training that have one.`));
      }
      if (!main.querySelector(".card")) main.append(R.el("p", { class: "quiet" }, "No completions are stored here, or none has such a value."));
    },
  };
})(window.Rloom);
