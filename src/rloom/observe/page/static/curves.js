"use strict";
// The curves of all metrics, and where the time went.
(function (R) {
  const FIRST = ["reward", "eval_reward", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio",
    "frac_reward_zero_std", "reward_std", "loss", "grad_norm", "learning_rate", "step_time"];

  const SHARE = /(^|[_/])(frac|ratio)([_/]|$)/;

  // For each metric, its course in the runs that have it. Bounds of intervals belong to their metric.
  function courses(runs, metrics) {
    const found = new Map();
    for (const info of runs) {
      const { steps, series } = metrics[info.run];
      for (const [name, values] of Object.entries(series)) {
        if (/_(low|high)$/.test(name) && series[name.replace(/_(low|high)$/, "")]) continue;
        if (name === "epoch" || !values.some((v) => v != null)) continue;
        if (!found.has(name)) found.set(name, []);
        const known = steps.map((_, i) => i).filter((i) => values[i] != null);
        const pick = (column) => column && known.map((i) => column[i]);
        found.get(name).push({ run: info.run, name: info.name, steps: pick(steps), values: pick(values),
          low: pick(series[`${name}_low`]), high: pick(series[`${name}_high`]) });
      }
    }
    return found;
  }

  function diagnoses(runs) {
    const list = R.el("ol", { class: "diagnoses" });
    for (const info of runs) {
      for (const one of info.diagnoses) {
        list.append(R.el("li", {}, R.el("b", {}, `update ${one.step}`), runs.length > 1 ? ` (${R.visible(info.name)})` : "",
          ": ", R.visible(one.diagnosis)));
      }
    }
    if (!list.childElementCount) return null;
    return R.el("section", { class: "card wide" }, R.el("h2", {}, "Diagnoses"),
      R.el("p", { class: "quiet" }, "Dashed lines in the curves are at these updates."), list);
  }

  function card(name, runs, meaning, marks) {
    const last = runs.map((one) => R.number(one.values[one.values.length - 1])).join(" · ");
    const box = R.el("section", { class: "card", "data-metric": name }, R.el("h2", { title: meaning || "" }, name, R.el("span", { class: "last" }, last)));
    R.lines(box, runs, R.state.smoothing, { marks, share: SHARE.test(name) });
    return box;
  }

  R.views.curves = {
    title: "Curves",
    show(main) {
      const runs = R.shown(), metrics = R.state.metrics;
      const found = courses(runs, metrics);
      const meanings = Object.assign({}, ...runs.map((r) => metrics[r.run].meanings));
      const marks = [...new Set(runs.flatMap((r) => r.diagnoses.map((d) => d.step)))];
      const slider = R.el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: R.state.smoothing, id: "smoothing",
        onchange: (event) => { R.state.smoothing = Number(event.target.value); R.render(); } });
      const wanted = R.el("input", { type: "search", id: "metric-filter", placeholder: "part of a name", value: R.state.metricFilter,
        onchange: (event) => { R.state.metricFilter = event.target.value; R.render(); } });
      main.append(R.el("form", { class: "bar", onsubmit: (event) => event.preventDefault() },
        R.el("label", {}, "Smoothing ", slider, R.el("output", {}, ` ${R.state.smoothing}`)), R.el("label", {}, "Metrics ", wanted)));
      const thinned = runs.filter((r) => metrics[r.run].every > 1);
      if (thinned.length) {
        main.append(R.el("p", { class: "quiet" }, `Of many logs, every ${metrics[thinned[0].run].every}th is drawn.`));
      }
      const names = [...found.keys()].filter((n) => n.includes(R.state.metricFilter));
      const first = FIRST.filter((n) => names.includes(n));
      const rest = names.filter((n) => !first.includes(n)).sort();
      const grid = R.el("div", { class: "grid" });
      main.append(...[diagnoses(runs), grid].filter(Boolean));
      for (const name of first) grid.append(card(name, found.get(name), meanings[name.replace(/^eval_/, "")] || meanings[name], marks));
      if (rest.length) {
        const more = R.el("div", { class: "grid" });
        const open = R.state.allMetrics || Boolean(R.state.metricFilter);
        const fill = () => { if (!more.childElementCount) for (const n of rest) more.append(card(n, found.get(n), meanings[n], marks)); };
        const details = R.el("details", { open, ontoggle: () => { R.state.allMetrics = details.open; if (details.open) fill(); } },
          R.el("summary", {}, `${rest.length} more metrics`), more);
        if (open) fill();
        main.append(details);
      }
      if (!names.length) main.append(R.el("p", { class: "quiet" }, "No metric was logged yet, or none has such a name."));
    },
  };

  R.views.time = {
    title: "Time",
    show(main) {
      for (const info of R.shown()) {
        const { steps, series } = R.state.metrics[info.run];
        const names = Object.keys(series).filter((n) => n.startsWith("time/"));
        if (!names.length) {
          main.append(R.el("p", { class: "quiet" }, `${R.visible(info.name)} has logged no times.`));
          continue;
        }
        const known = steps.map((_, i) => i).filter((i) => series[names[0]][i] != null);
        const whole = series.step_time ? known.map((i) => series.step_time[i]) : null;
        const parts = names.map((n) => ({ name: n.slice(5), values: known.map((i) => series[n][i] || 0) }));
        const mean = (list) => list.reduce((a, b) => a + (b || 0), 0) / Math.max(1, list.length);
        const total = parts.reduce((sum, part) => sum + mean(part.values), 0);
        const table = R.el("table", {}, R.el("thead", {}, R.el("tr", {}, ...["phase", "seconds per update", "share"].map((t) => R.el("th", {}, t)))));
        const body = R.el("tbody");
        for (const part of parts) {
          const seconds = mean(part.values);
          body.append(R.el("tr", {}, R.el("td", {}, part.name), R.el("td", {}, R.number(seconds)), R.el("td", {}, `${(100 * seconds / (total || 1)).toFixed(1)}%`)));
        }
        table.append(body);
        const box = R.el("section", { class: "card wide" }, R.el("h2", {}, `${R.visible(info.name)}: seconds of an update, by phase`));
        main.append(box);
        R.stack(box, known.map((i) => steps[i]), parts, { height: 260, marks: info.diagnoses.map((d) => d.step) });
        box.append(table, whole ? R.el("p", { class: "quiet" }, `A step takes ${R.number(mean(whole))} s on average, saving and logging apart.`) : "");
      }
    },
  };
})(window.Rloom);
