// The figures of a probe: its heads against length, at a length, and their horizons.

// ---- entropy against length

const TOKENS = { label: "tokens", log: true, base: 2, sizes: true, tick: tokens };

function headCurve(probe, head) {
  const points = probe.lengths
    .map((length) => ({ x: length.tokens, y: valueOf(length, "entropy", head), deviation: errorOf(length, "entropy", head) }))
    .filter((p) => isNumber(p.y));
  return { name: headName(head), head, points, look: { ...HEAD_CLASSES[head.class], symbol: null }, thin: true, faint: probe.heads.length > 60 };
}

// Mean over heads, and between which values eight of ten lie.
function meanCurve(curves, xs) {
  const points = xs
    .map((x) => ({ x, values: curves.flatMap((c) => c.points.filter((p) => p.x === x).map((p) => p.y)).sort(d3.ascending) }))
    .filter(({ values }) => values.length > 0)
    .map(({ x, values }) => ({ x, y: d3.mean(values), low: d3.quantile(values, 0.1), high: d3.quantile(values, 0.9) }));
  return { name: `mean of ${plural(curves.length, "head")}`, points, look: { colour: "--ink", dash: null, symbol: d3.symbolCircle }, band: curves.length > 1 };
}

function addHeadEntropies(parent, probe) {
  const state = { layer: "all" };
  const xs = probe.lengths.map((length) => length.tokens);
  const chosen = () => probe.heads.filter((head) => state.layer === "all" || head.layer === Number(state.layer));
  const curves = () => chosen().map((head) => headCurve(probe, head));
  const uniform = { name: "even weights: ln n", points: xs.map((x) => ({ x, y: Math.log(x) })), look: LIMIT_LOOK };
  const where = () => (state.layer === "all" ? "" : ` in layer ${state.layer}`);
  const figure = addLines(parent, {
    id: "probe-entropy",
    title: () => {
      const [first, last] = ends(meanCurve(curves(), xs).points);
      if (!first) return `Entropy of the heads${where()} against length`;
      const said = (p) => `${short(p.y)}\u00a0nats at ${tokens(p.x)} tokens`;
      if (first === last) return `Mean entropy of the heads${where()} is ${said(first)}`;
      return `Mean entropy of the heads${where()} ${last.y < first.y ? "falls" : "grows"} from ${said(first)} to ${said(last)}`;
    },
    note: "One thin line per head, coloured by class; shaded: eight of ten heads. No head can lie above the dashed line.",
    alt: "Curves of entropy in nats against the number of tokens, one per head, with their mean and the upper bound ln n.",
    controls: [
      choice("Layer", [["all", "all layers"], ...d3.range(probe.model.layers).map((i) => [String(i), `layer ${i}`])], "all", (layer) => {
        state.layer = layer;
        figure.redraw();
      }),
    ],
    x: TOKENS,
    y: { label: "entropy, nats", domain: ([, high]) => [0, Math.max(high, Math.log(longestOf(probe).tokens))], nice: false },
    series: () => [...curves(), uniform, meanCurve(curves(), xs)],
    legend: (series) => [...series.filter((s) => !s.head), ...classesIn(chosen()).map((name) => ({ name, look: { ...HEAD_CLASSES[name], symbol: null } }))],
    targets: headTargets,
    rows: () => [
      ["layer", "head", "class", "tokens", "entropy, nats", "standard error"],
      ...probe.heads.flatMap((head) => headCurve(probe, head).points.map((p) => [head.layer, head.head, head.class, p.x, p.y, p.deviation])),
    ],
  });
}

// Hovering finds the nearest point; by keys, left and right go along a head, up and down to another.
function headTargets(spec, series, x, y) {
  const ordered = [...series.filter((s) => !s.head && s.look !== LIMIT_LOOK), ...series.filter((s) => s.head)];
  const targets = ordered.flatMap((s) =>
    s.points.map((p) => ({
      x: x(p.x),
      y: y(p.y),
      series: s,
      title: s.name,
      lines: [
        { name: `entropy at ${tokens(p.x)} tokens`, value: withError(p.y, p.deviation), colour: s.look.colour },
        { name: "of ln n", value: `${percent(p.y / Math.log(p.x))} %` },
        ...(s.head
          ? [{ name: "class", value: s.head.class }, { name: "slope", value: withInterval(s.head) }]
          : s.band ? [{ name: "eight of ten heads", value: `${short(p.low)} … ${short(p.high)}` }] : []),
      ],
    })),
  );
  return {
    targets,
    row: d3.max(ordered, (s) => s.points.length) ?? 1,
    nearest: (px, py) => nearestOf(targets, px, py),
    mark(group, target) {
      const line = d3.line().x((p) => x(p.x)).y((p) => y(p.y));
      group.append("path").attr("class", "curve chosen").style("stroke", `var(${target.series.look.colour})`).attr("d", line(target.series.points));
      group.append("circle").attr("class", "rim").attr("cx", target.x).attr("cy", target.y).attr("r", 5);
    },
  };
}

const withInterval = ({ slope, low, high }) =>
  isNumber(slope) ? minus(fixed(slope, 2)) + (isNumber(low) && isNumber(high) ? ` [${minus(fixed(low, 2))}, ${minus(fixed(high, 2))}]` : "") : "–";

const nearestOf = (targets, px, py) =>
  targets.length ? d3.scan(targets, (a, b) => Math.hypot(a.x - px, a.y - py) - Math.hypot(b.x - px, b.y - py)) : -1;

// ---- every head at a length

// Name, and the values that the lightest and the darkest cell stand for, the same at all lengths.
const STATISTICS = {
  entropy: { name: "entropy, nats", domain: (probe) => [0, Math.log(longestOf(probe).tokens)] },
  relative_entropy: { name: "entropy / ln n", domain: () => [0, 1] },
  peak: { name: "largest weight", domain: () => [0, 1] },
  first: { name: "weight on the first key", domain: () => [0, 1] },
  spread: { name: "spread of the logits", domain: (probe) => rangeWith(0, probe, "spread") },
  beta: { name: "inverse temperature β", domain: (probe) => rangeWith(1, probe, "beta"), ruled: true },
  sharp_entropy: { name: "entropy, nats", domain: (probe) => [0, Math.log(longestOf(probe).tokens)], ruled: true },
  sharp_peak: { name: "largest weight", domain: () => [0, 1], ruled: true },
};
const statisticName = (probe, statistic) => STATISTICS[statistic].name + (STATISTICS[statistic].ruled ? ` under ${probe.rule}` : "");

// The least and the largest mean of any head at any length, and a value that is to be among them.
const rangeWith = (value, probe, statistic) =>
  d3.extent([value, ...probe.lengths.flatMap((length) => length.statistics[statistic].mean.flat()).filter(isNumber)]);

function addHeadMap(parent, probe) {
  const state = { length: probe.lengths.length - 1, statistic: "entropy" };
  const output = element("output");
  const slider = element("input", { type: "range", min: 0, max: probe.lengths.length - 1, step: 1, value: state.length });
  const showLength = () => {
    output.textContent = `${tokens(probe.lengths[state.length].tokens)} tokens`;
    slider.setAttribute("aria-valuetext", output.textContent);
  };
  slider.addEventListener("input", () => {
    state.length = Number(slider.value);
    showLength();
    figure.redraw();
  });
  showLength();
  const figure = addFigure(parent, {
    id: "probe-map",
    title: () => mapTitle(probe, state),
    note: "One column per layer, one row per head. The scale is the same at all lengths.",
    alt: () => `${capital(statisticName(probe, state.statistic))} of every head, darker where it is larger.`,
    controls: [
      element("label", {}, "Length", slider, output),
      choice("Statistic", Object.keys(STATISTICS).map((name) => [name, statisticName(probe, name)]), state.statistic, (statistic) => {
        state.statistic = statistic;
        figure.redraw();
      }),
    ],
    draw: (svg, width) => drawMap(svg, width, probe, state),
    rows: () => mapRows(probe),
  });
}

function mapTitle(probe, { length: at, statistic }) {
  const length = probe.lengths[at];
  const known = probe.heads.filter((head) => isNumber(valueOf(length, statistic, head)));
  const name = capital(statisticName(probe, statistic).replace(", nats", ""));
  if (known.length === 0) return `${name} at ${tokens(length.tokens)} tokens`;
  const most = known[d3.scan(known, (a, b) => valueOf(length, statistic, b) - valueOf(length, statistic, a))];
  const value = withError(valueOf(length, statistic, most), errorOf(length, statistic, most));
  return `${name} at ${tokens(length.tokens)} tokens is largest in ${headName(most)}: ${value}`;
}

function mapRows(probe) {
  const names = Object.keys(STATISTICS);
  return [
    ["layer", "head", "class", "tokens", ...names.flatMap((name) => [name, `${name} error`])],
    ...probe.lengths.flatMap((length) =>
      probe.heads.map((head) => [
        head.layer,
        head.head,
        head.class,
        length.tokens,
        ...names.flatMap((name) => [valueOf(length, name, head), errorOf(length, name, head)]),
      ]),
    ),
  ];
}

function drawMap(svg, width, probe, { length: at, statistic }) {
  const { layers, heads } = probe.model;
  const [left, top] = [MARGIN.left, 26];
  const across = Math.min(64, (width - left - 2) / layers);
  const down = Math.max(8, Math.min(30, across, 640 / heads));
  const [right, bottom] = [left + across * layers, top + down * heads];
  const shade = d3.scaleLinear().domain(STATISTICS[statistic].domain(probe)).range([0, 1]).clamp(true);
  svg.attr("height", bottom + 92);
  drawMapAxes(svg, { layers, heads, left, top, right, bottom, across, down });
  const length = probe.lengths[at];
  const ordered = [...probe.heads].sort((a, b) => a.head - b.head || a.layer - b.layer);
  const targets = ordered.map((head) => {
    const box = [left + head.layer * across, top + head.head * down, across, down];
    const value = valueOf(length, statistic, head);
    drawMapCell(svg, box, isNumber(value) ? shade(value) : null);
    return { x: box[0] + across, y: box[1], box, title: headName(head), lines: mapLines(probe, length, statistic, head) };
  });
  drawMapScale(svg, width, bottom + 48, shade, statisticName(probe, statistic));
  return {
    targets,
    row: layers,
    nearest: (x, y) => targets.findIndex(({ box: [l, t, w, h] }) => x >= l && x < l + w && y >= t && y < t + h),
    mark(group, { box: [l, t, w, h] }) {
      group.append("rect").attr("class", "rim").attr("x", l).attr("y", t).attr("width", w).attr("height", h);
    },
  };
}

function drawMapCell(svg, [x, y, width, height], share) {
  const rect = (name) =>
    svg.append("rect").attr("class", name).attr("x", x).attr("y", y).attr("width", Math.max(1, width - 1)).attr("height", Math.max(1, height - 1));
  rect("zero");
  if (share !== null) rect("cell").attr("fill-opacity", fixed(share, 3));
  else svg.append("line").attr("class", "cross").attr("x1", x).attr("y1", y + height - 1).attr("x2", x + width - 1).attr("y2", y);
}

function drawMapAxes(svg, { layers, heads, left, top, bottom, right, across, down }) {
  const label = (to, text, x, y, anchor) => to.append("text").attr("class", "unit").attr("x", x).attr("y", y).attr("text-anchor", anchor).text(text);
  const [below, beside] = [svg.append("g").attr("class", "axis"), svg.append("g").attr("class", "axis")];
  d3.range(0, layers, stepFor(across, 26)).forEach((i) => label(below, String(i), left + (i + 0.5) * across, bottom + 15, "middle"));
  d3.range(0, heads, stepFor(down, 15)).forEach((j) => label(beside, String(j), left - 6, top + (j + 0.5) * down + 4, "end"));
  label(svg, "head", left - 6, top - 10, "end");
  label(svg, "layer", right, bottom + 32, "end");
}

// Of labels `room` apart, every how many leave each its `needed` pixels.
const stepFor = (room, needed) => [1, 2, 5, 10, 20, 50, 100].find((step) => step * room >= needed) ?? 1000;

function drawMapScale(svg, width, y, shade, name) {
  const [steps, length] = [25, Math.min(220, width - 120)];
  const [low, high] = shade.domain();
  const group = svg.append("g").attr("transform", `translate(${MARGIN.left},${y})`);
  group.append("rect").attr("class", "zero").attr("width", length).attr("height", 10);
  for (let i = 0; i < steps; ++i) {
    group.append("rect").attr("class", "cell").attr("x", (i * length) / steps).attr("width", length / steps + 0.3).attr("height", 10).attr("fill-opacity", fixed((i + 0.5) / steps, 3));
  }
  const ends = [[low, 0, "start"], [(low + high) / 2, length / 2, "middle"], [high, length, "end"]];
  for (const [value, x, anchor] of ends) group.append("text").attr("class", "unit").attr("x", x).attr("y", 25).attr("text-anchor", anchor).text(short(value));
  shorten(group.append("text").attr("class", "unit").attr("y", -6).text(name), width - MARGIN.left);
}

// What is drawn first, then the rest.
function mapLines(probe, length, statistic, head) {
  const names = [statistic, ...["entropy", "relative_entropy", "peak", "first", "spread", "beta"].filter((name) => name !== statistic)];
  return [
    ...names.map((name) => ({ name: statisticName(probe, name), value: withError(valueOf(length, name, head), errorOf(length, name, head)) })),
    { name: "class", value: head.class, colour: HEAD_CLASSES[head.class].colour },
  ];
}

// ---- horizons

// Beyond, horizons are no longer told apart: they are far above any context.
const FAR = 1e4;

function addHorizons(parent, probe) {
  const known = probe.heads.filter((head) => head.horizon > 0);
  const reach = probe.model.context ?? longestOf(probe).tokens;
  const reachName = probe.model.context ? "the context it was trained for" : "the longest length";
  const before = known.filter((head) => head.horizon < reach).length;
  const without = probe.heads.length - known.length;
  addFigure(parent, {
    id: "probe-horizons",
    title: `${plural(before, "head")} of ${count(probe.heads.length)} ${before === 1 ? "ends" : "end"} before ${tokens(reach)} tokens, ${reachName}`,
    note:
      `The horizon of a head: the tokens up to which the spread of its logits at ${tokens(longestOf(probe).tokens)} tokens lets one key have a weight of ` +
      `${short(probe.horizon_weight)}. Lines across: the lengths that were measured` +
      (probe.model.context ? ", and the context (strong)." : ".") +
      (without ? ` ${plural(without, "head")} without a horizon ${without === 1 ? "is" : "are"} left out.` : ""),
    alt: "One marker per head, by layer, on a logarithmic axis of tokens.",
    draw: (svg, width) => drawHorizons(svg, width, probe, known),
    rows: () => [["layer", "head", "class", "horizon, tokens"], ...probe.heads.map((head) => [head.layer, head.head, head.class, head.horizon])],
  });
}

function drawHorizons(svg, width, probe, heads) {
  const legend = drawLegend(svg, classesIn(heads).map((name) => ({ name, look: HEAD_CLASSES[name], marker: true })), width);
  const [top, context] = [legend + 34, probe.model.context];
  const height = top + Math.max(220, Math.min(380, Math.round(width * 0.45))) + MARGIN.bottom;
  svg.attr("height", height);
  const marks = [...probe.lengths.map((length) => length.tokens), ...(context ? [context] : [])];
  const most = FAR * d3.max(marks);
  const y = scaleOf({ log: true }, [...marks, ...heads.map((head) => Math.min(head.horizon, most))], [height - MARGIN.bottom, top]);
  const [left, right] = [MARGIN.left + 10, width - MARGIN.right - 52];
  const x = d3.scaleBand().domain(d3.range(probe.model.layers)).range([left, right]).padding(0.2);
  drawHorizonAxes(svg, { height, top, right, x, y, marks, context });
  if (heads.some((head) => head.horizon > most)) svg.append("text").attr("class", "unit").attr("x", right + 6).attr("y", y(most) + 4).text("beyond");
  const targets = [...heads]
    .sort((a, b) => a.layer - b.layer || a.head - b.head)
    .map((head) => {
      const at = { x: x(head.layer) + ((head.head + 0.5) / probe.model.heads) * x.bandwidth(), y: y(Math.min(head.horizon, most)) };
      drawHead(svg, head, at, x.bandwidth() / probe.model.heads);
      return { ...at, title: headName(head), lines: horizonLines(probe, head, context) };
    });
  return {
    targets,
    row: probe.model.heads,
    nearest: (px, py) => nearestOf(targets, px, py),
    mark: (group, t) => group.append("circle").attr("class", "rim").attr("cx", t.x).attr("cy", t.y).attr("r", 8),
  };
}

function drawHead(svg, head, { x, y }, room) {
  const { colour, symbol } = HEAD_CLASSES[head.class];
  svg
    .append("path")
    .attr("class", "marker head-dot")
    .attr("d", d3.symbol().type(symbol).size(room > 5 ? 46 : 24))
    .attr("transform", `translate(${x},${y})`)
    .style("stroke", `var(${colour})`);
}

function horizonLines(probe, head, context) {
  const at = longestOf(probe);
  return [
    { name: "horizon", value: `${tokens(head.horizon)} tokens`, colour: HEAD_CLASSES[head.class].colour },
    ...(context ? [{ name: "of the context", value: `${short(head.horizon / context)} ×` }] : []),
    { name: "spread", value: withError(valueOf(at, "spread", head), errorOf(at, "spread", head)) },
    { name: "class", value: head.class },
  ];
}

function drawHorizonAxes(svg, { height, top, right, x, y, marks, context }) {
  for (const mark of marks) {
    svg.append("line").attr("class", mark === context ? "rim" : "cross").attr("x1", MARGIN.left).attr("x2", right).attr("y1", y(mark)).attr("y2", y(mark));
  }
  // The context first: where there is no room, a length gives way to it.
  const labelled = [];
  for (const mark of [...(context ? [context] : []), ...[...marks].reverse()]) {
    if (labelled.every((other) => Math.abs(y(other) - y(mark)) >= 14)) labelled.push(mark);
  }
  for (const mark of labelled) {
    const label = svg.append("text").attr("x", right + 6).attr("y", y(mark) + 4).text(tokens(mark));
    if (mark === context) label.attr("font-weight", 600);
    else label.attr("class", "unit");
  }
  const axis = (made, transform) => svg.append("g").attr("class", "axis").attr("transform", transform).call(made);
  const step = stepFor(x.step(), 26);
  axis(d3.axisBottom(x).tickValues(x.domain().filter((i) => i % step === 0)).tickSize(5), `translate(0,${height - MARGIN.bottom})`);
  axis(d3.axisLeft(y).tickValues(logTicks(y)).tickFormat(d3.format("~s")).tickSize(0).tickPadding(6), `translate(${MARGIN.left},0)`).select(".domain").remove();
  svg.append("text").attr("class", "unit").attr("x", 0).attr("y", top - 12).text("horizon, tokens");
  svg.append("text").attr("class", "unit").attr("x", right).attr("y", height - 6).attr("text-anchor", "end").text("layer");
}
