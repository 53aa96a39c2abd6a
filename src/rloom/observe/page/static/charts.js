"use strict";
// Charts by uPlot: lines of several runs over their steps, bands of intervals, marks of diagnoses, bars.
(function (R) {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  R.color = (run) => css(`--c${run % 8}`);
  const faint = (color, alpha) => color + Math.round(alpha * 255).toString(16).padStart(2, "0");

  // An exponential mean over the known values, corrected for its start.
  R.smoothed = function (values, weight) {
    if (!weight) return values;
    let mean = 0, total = 0;
    return values.map((v) => {
      if (v == null) return null;
      mean = weight * mean + (1 - weight) * v;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  };

  // Numbers beside an axis, with as many digits as tell them apart and say where they are.
  function told(ticks, digits = 3) {
    const known = ticks.filter((v) => v != null), gap = known.length > 1 ? Math.abs(known[1] - known[0]) : Infinity;
    const enough = known.every((v) => Math.abs(Number(v.toPrecision(digits)) - v) < gap / 100);
    return enough || digits >= 12 ? ticks.map((v) => R.number(v, digits)) : told(ticks, digits + 1);
  }

  // What a curve spans, with some room. One that never moves has a small range around it, or all that a share can be.
  const PAD = { mode: 3, pad: 0.1 };
  const span = (share) => (u, low, high) => {
    if (low == null) return [null, null];
    // The smoothed values of a constant differ in their last bits.
    if (high - low > 1e-9 * Math.abs(high)) return uPlot.rangeNum(low, high, { min: PAD, max: PAD });
    return share && low >= 0 && low <= 1 ? [0, 1] : [low - (Math.abs(low) / 10 || 0.1), low + (Math.abs(low) / 10 || 0.1)];
  };

  const axes = () => {
    const look = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const values = (u, ticks) => told(ticks);
    // As wide as the longest number, so that no sign is cut off.
    const wide = (u, texts) => Math.max(58, 18 + 7 * Math.max(0, ...(texts || []).map((text) => text.length)));
    return [{ ...look, size: 28, values }, { ...look, size: wide, values }];
  };

  // Vertical lines at the steps of diagnoses.
  const drawMarks = (marks) => (u) => {
    u.ctx.save();
    u.ctx.strokeStyle = css("--warn");
    u.ctx.setLineDash([4, 4]);
    for (const step of marks) {
      const x = u.valToPos(step, "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      u.ctx.beginPath();
      u.ctx.moveTo(x, u.bbox.top);
      u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
    }
    u.ctx.restore();
  };

  // A chart in `box`, as wide as that. `options` are uPlot's; it is drawn when it comes into view.
  R.draw = function (box, options, data, { height = 190, marks = [], unnamed = [], share = false } = {}) {
    const plot = R.el("div", { class: "plot" });
    box.append(plot);
    const width = () => Math.max(120, Math.floor(plot.clientWidth));
    let chart = null;
    const make = () => {
      chart = new uPlot({
        width: width(), height, axes: axes(), legend: { show: true, live: true }, cursor: { sync: { key: "steps" }, points: { size: 6 } },
        scales: { x: { time: false }, y: { range: span(share) } }, hooks: { draw: [drawMarks(marks)] }, ...options,
      }, data, plot);
      const names = plot.querySelectorAll(".u-legend .u-series");
      for (const number of unnamed) names[number].hidden = true;
      plot.dataset.drawn = "1";
    };
    const seen = new IntersectionObserver((found) => {
      if (found.some((one) => one.isIntersecting) && !chart && plot.isConnected) { make(); seen.disconnect(); }
    }, { rootMargin: "200px" });
    seen.observe(plot);
    new ResizeObserver(() => { if (chart && chart.width !== width()) chart.setSize({ width: width(), height }); }).observe(plot);
    return { setData: (next) => { data = next; if (chart) chart.setData(next); } };
  };

  // One metric of several runs: what was logged faintly, the smoothed line over it, intervals as a band.
  R.lines = function (box, runs, smoothing, options) {
    const tables = [], series = [{ label: "step" }], bands = [], unnamed = [];
    for (const { run, name, steps, values, low, high } of runs) {
      const color = R.color(run);
      const columns = [steps];
      const add = (column, look) => { columns.push(column); series.push({ spanGaps: true, points: { show: false }, ...look }); };
      if (smoothing) unnamed.push(series.length);
      if (smoothing) add(values, { label: `${name}, as logged`, stroke: faint(color, 0.25), width: 1 });
      const few = values.filter((v) => v != null).length < 30;
      add(R.smoothed(values, smoothing), { label: name, stroke: color, width: 1.75, points: { show: few, size: 5 } });
      if (low && high) {
        add(high, { label: `${name}, high`, stroke: faint(color, 0.35), width: 1 });
        add(low, { label: `${name}, low`, stroke: faint(color, 0.35), width: 1 });
        bands.push({ series: [series.length - 2, series.length - 1], fill: faint(color, 0.15) });
      }
      tables.push(columns);
    }
    const data = tables.length > 1 ? uPlot.join(tables, tables.map((t) => t.map(() => 2))) : tables[0];
    return R.draw(box, { series, bands }, data, { ...options, unnamed });
  };

  R.stack = function (box, steps, parts, options) {
    const series = [{ label: "step" }], data = [steps], bands = [];
    let sum = steps.map(() => 0);
    parts.forEach(({ name, values }, number) => {
      sum = sum.map((s, i) => s + (values[i] || 0));
      data.push(sum);
      const own = values;
      series.push({ label: name, stroke: R.color(number), width: 1, fill: number ? undefined : faint(R.color(number), 0.35),
        points: { show: false }, value: (u, v, s, i) => (i == null ? "–" : R.number(own[i])) });
      if (number) bands.push({ series: [number + 1, number], fill: faint(R.color(number), 0.35) });
    });
    return R.draw(box, { series, bands }, data, options);
  };

  R.bars = function (box, edges, counts, label, run, options) {
    const centers = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
    const color = R.color(run);
    const series = [{ label, value: (u, v) => R.number(v) },
      { label: "completions", stroke: color, fill: faint(color, 0.4), paths: uPlot.paths.bars({ size: [0.95] }), points: { show: false } }];
    const width = edges[1] - edges[0];
    const scales = { x: { time: false, range: [edges[0] - width, edges[edges.length - 1] + width] } };
    return R.draw(box, { series, scales, cursor: {} }, [centers, counts], options);
  };
})(window.Rloom);
