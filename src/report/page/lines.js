// Curves against a number: axes, grid, legend, hover. All line figures of the page are one of these.

const MARGIN = { left: 46, right: 14, bottom: 42 };
const LEGEND_ROW = 20;

// spec of addFigure, and
//   x, y: {label, log, ticks?, domain?, format}; y.value(point): what hovering says in place of y.format(y)
//   series(): [{name, points: [{x, y, deviation?, low?, high?, solid?}], look, thin?, dashed?, band?, unlisted?, continues?, solid?}]
//     thin ones are dashed if they say so; of solid ones, the points that are solid are marked, filled, and no others
//   legend(series): what the legend lists instead of the series; targets: in place of lineTargets
//   dots(): points of a scatter below the curves
function addLines(parent, spec) {
  return addFigure(parent, {
    rows: () => lineRows(spec),
    ...spec,
    draw: (svg, width) => drawLines(svg, width, spec),
  });
}

function lineRows(spec) {
  const rows = [["curve", spec.x.label, spec.y.label, "deviation"]];
  for (const series of spec.series()) {
    for (const p of series.points) rows.push([series.name, p.x, p.y, p.deviation]);
  }
  for (const p of spec.dots?.() ?? []) rows.push(["dot", p.x, p.y, null]);
  return rows;
}

// More dots than these hide each other, and slow a browser down.
const MOST_DOTS = 4000;
const everyNth = (dots) => Math.max(1, Math.ceil(dots.length / MOST_DOTS));

function drawLines(svg, width, spec) {
  const series = spec.series().filter((s) => s.points.length > 0);
  const every = everyNth(spec.dots?.() ?? []);
  const dots = (spec.dots?.() ?? []).filter((_, i) => i % every === 0);
  const legend = drawLegend(svg, spec.legend?.(series) ?? series.filter((s) => !s.unlisted), width, spec.dotsName);
  const top = legend + 34;
  const height = top + Math.max(190, Math.min(340, Math.round(width * 0.42))) + MARGIN.bottom;
  svg.attr("height", height);
  const all = [...series.flatMap((s) => s.points), ...dots];
  if (all.length === 0) {
    svg.append("text").attr("x", 0).attr("y", top).text("Nothing to draw: these results hold no such values.");
    return null;
  }
  const x = scaleOf(spec.x, all.map((p) => p.x), [MARGIN.left, width - MARGIN.right]);
  const y = scaleOf(spec.y, all.map((p) => p.y), [height - MARGIN.bottom, top]);
  drawAxes(svg, spec, x, y, { width, height, top, values: [...new Set(all.map((p) => p.x))].sort(d3.ascending) });
  drawDots(svg, dots, x, y);
  series.filter((s) => s.band).forEach((s) => drawBand(svg, s, x, y));
  [...series].sort((a, b) => Boolean(b.look.wide) - Boolean(a.look.wide)).forEach((s) => drawCurve(svg, s, x, y));
  return (spec.targets ?? lineTargets)(spec, series, x, y, { top, bottom: height - MARGIN.bottom });
}

// ---- scales and axes

function scaleOf(axis, values, range) {
  const usable = axis.log ? values.filter((v) => v > 0) : values;
  let [low, high] = axis.domain?.(d3.extent(usable)) ?? d3.extent(usable);
  if (!axis.log) {
    if (low === high) [low, high] = [low - 1, high + 1];
    return d3.scaleLinear().domain([low, high]).range(range).nice(axis.nice === false ? undefined : 5).clamp(true);
  }
  if (!(low > 0)) [low, high] = [0.5, 2];
  if (low === high) [low, high] = [low / 2, high * 2];
  if (!axis.sizes && !axis.domain) [low, high] = [low / 1.15, high * 1.15];
  return d3.scaleLog().base(axis.base ?? 10).domain([low, high]).range(range).clamp(true);
}

// Of sizes that double, as many as fit, the largest among them.
function sizeTicks(values, scale, width) {
  const kept = [];
  for (const value of [...values].reverse()) {
    if (!kept.length || Math.abs(scale(kept[kept.length - 1]) - scale(value)) >= width) kept.push(value);
  }
  return kept.reverse();
}

function logTicks(scale) {
  const [low, high] = scale.domain();
  const decades = Math.log10(high / low);
  if (decades < 0.6) return d3.ticks(low, high, 5);
  const steps = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7];
  const ticks = [];
  const every = Math.max(1, Math.ceil(decades / 6));
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += every) {
    for (const step of steps) {
      const tick = step * 10 ** e;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(Number(tick.toPrecision(6)));
    }
  }
  return ticks.length > 1 ? ticks : scale.domain();
}

function drawAxes(svg, spec, x, y, { width, height, top, values }) {
  const yTicks = spec.y.log ? logTicks(y) : y.ticks(5);
  const xTicks = spec.x.sizes ? sizeTicks(values, x, 54) : x.ticks(Math.max(3, Math.floor(width / 110)));
  svg
    .append("g")
    .attr("class", "grid")
    .selectAll("line")
    .data(yTicks)
    .join("line")
    .attr("x1", MARGIN.left)
    .attr("x2", width - MARGIN.right)
    .attr("y1", y)
    .attr("y2", y);
  const axis = (made, transform) => svg.append("g").attr("class", "axis").attr("transform", transform).call(made);
  axis(d3.axisBottom(x).tickValues(xTicks).tickFormat(spec.x.tick ?? (spec.x.sizes ? count : short)).tickSize(5), `translate(0,${height - MARGIN.bottom})`);
  axis(d3.axisLeft(y).tickValues(yTicks).tickFormat(spec.y.tick ?? short).tickSize(0).tickPadding(6), `translate(${MARGIN.left},0)`).select(".domain").remove();
  keepInside(svg, width);
  svg.append("text").attr("class", "unit").attr("x", 0).attr("y", top - 12).text(spec.y.label);
  svg.append("text").attr("class", "unit").attr("x", width - MARGIN.right).attr("y", height - 6).attr("text-anchor", "end").text(spec.x.label);
}

// The last label of a log axis may stand over the edge.
function keepInside(svg, width) {
  svg.selectAll(".axis text").each(function () {
    const box = this.getBoundingClientRect();
    const over = box.right - svg.node().getBoundingClientRect().left - width;
    if (over > 0 && box.width > 0) this.setAttribute("x", Number(this.getAttribute("x") ?? 0) - over);
  });
}

// ---- curves

function drawDots(svg, dots, x, y) {
  svg
    .append("g")
    .selectAll("circle")
    .data(dots)
    .join("circle")
    .attr("class", "dot")
    .attr("r", dots.length > 800 ? 1.8 : 2.6)
    .attr("cx", (p) => x(p.x))
    .attr("cy", (p) => y(p.y));
}

function drawBand(svg, series, x, y) {
  const area = d3
    .area()
    .x((p) => x(p.x))
    .y0((p) => y(p.low ?? p.y - (p.deviation ?? 0)))
    .y1((p) => y(p.high ?? p.y + (p.deviation ?? 0)));
  svg.append("path").attr("class", "band").style("fill", `var(${series.look.colour})`).attr("d", area(series.points));
}

const curveClass = ({ thin, faint, look: l }) => `curve${thin ? " thin" : ""}${faint ? " faint" : ""}${l.wide ? " wide" : ""}`;

function drawCurve(svg, series, x, y) {
  const { colour, dash, symbol } = series.look;
  const drawn = series.points.filter((p) => isNumber(x(p.x)) && isNumber(y(p.y)));
  const line = d3
    .line()
    .x((p) => x(p.x))
    .y((p) => y(p.y));
  svg
    .append("path")
    .attr("class", curveClass(series))
    .attr("data-name", series.name)
    .style("stroke", `var(${colour})`)
    .attr("stroke-dasharray", series.thin && !series.dashed ? null : dash)
    .attr("d", line(drawn));
  const alone = drawn.length === 1; // no line to see
  if (series.solid && !alone) {
    drawSolid(svg, series.look, drawn.filter((p) => p.solid), x, y);
    return;
  }
  if (!alone && (!symbol || series.thin || series.smooth || drawn.length > 40)) return;
  svg
    .append("g")
    .selectAll("path")
    .data(drawn)
    .join("path")
    .attr("class", "marker")
    .style("stroke", `var(${colour})`)
    .attr("d", d3.symbol().type(symbol ?? d3.symbolCircle).size(38))
    .attr("transform", (p) => `translate(${x(p.x)},${y(p.y)})`);
}

function drawSolid(svg, { colour }, points, x, y) {
  svg
    .append("g")
    .selectAll("circle")
    .data(points)
    .join("circle")
    .attr("class", "solid")
    .style("fill", `var(${colour})`)
    .attr("r", 4)
    .attr("cx", (p) => x(p.x))
    .attr("cy", (p) => y(p.y));
}

// Rows of samples and names; returns its height.
function drawLegend(svg, series, width, dotsName) {
  let [left, row] = [0, 0];
  const add = (name, draw) => {
    const item = svg.append("g");
    draw(item);
    const label = item.append("text").attr("x", 30).attr("y", 4).text(name);
    const needed = Math.min(width, 30 + label.node().getComputedTextLength());
    if (left > 0 && left + needed > width) [left, row] = [0, row + 1];
    item.attr("transform", `translate(${left},${row * LEGEND_ROW + 10})`);
    shorten(label, width - left - 30);
    left += needed + 18;
  };
  if (series.length === 1 && !dotsName) return 0; // the title says what it is
  for (const s of series) {
    const { name, look: l, smooth } = s;
    add(name, (item) => {
      if (!s.marker) item.append("path").attr("class", curveClass(s)).style("stroke", `var(${l.colour})`).attr("stroke-dasharray", l.dash).attr("d", "M0,0H25");
      if (l.symbol && !smooth) {
        item.append("path").attr("class", "marker").style("stroke", `var(${l.colour})`).attr("d", d3.symbol().type(l.symbol).size(34)).attr("transform", "translate(12.5,0)");
      }
    });
  }
  if (dotsName) add(dotsName, (item) => item.append("circle").attr("class", "dot").attr("cx", 12.5).attr("r", 3));
  return left > 0 ? (row + 1) * LEGEND_ROW : 0;
}

// Names come from files and may be of any length.
function shorten(label, width) {
  let name = label.text();
  while (name.length > 4 && label.node().getComputedTextLength() > width) {
    name = name.slice(0, -2);
    label.text(`${name}…`);
  }
}

// ---- hovering: all curves at the nearest x

function lineTargets(spec, series, x, y, { top, bottom }) {
  const format = spec.y.format ?? short;
  const xs = [...new Set(series.flatMap((s) => s.points.map((p) => p.x)))].sort(d3.ascending);
  const curves = series.map((s) => ({ s, at: new Map(s.points.map((p) => [p.x, p])) }));
  const targets = xs.map((value) => ({
    x: x(value),
    y: top,
    title: spec.x.title?.(value) ?? `${count(value)} ${spec.x.label}`,
    lines: curves
      .map(({ s, at }) => ({ s, p: at.get(value) }))
      .filter(({ p }) => p)
      .sort((a, b) => b.p.y - a.p.y)
      .map(({ s, p }) => ({
        name: s.name,
        value: spec.y.value?.(p) ?? format(p.y) + (isNumber(p.deviation) ? ` ±${format(p.deviation)}` : ""),
        colour: s.look.colour,
      })),
  }));
  return {
    targets,
    nearest(px) {
      return targets.length ? d3.scan(targets, (a, b) => Math.abs(a.x - px) - Math.abs(b.x - px)) : -1;
    },
    mark(group, target) {
      group.append("line").attr("class", "cross").attr("x1", target.x).attr("x2", target.x).attr("y1", top).attr("y2", bottom);
    },
  };
}
