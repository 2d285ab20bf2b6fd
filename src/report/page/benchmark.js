// Benchmarks: what was measured beside the limit it was asked to keep.

function drawBenchmarks({ runs }) {
  const bars = runs.flatMap((run) => sectionsOf(run).flatMap(barsIn));
  const kept = bars.filter(keeps).length;
  header(
    `benchmark, ${runs.map((run) => run.name).join(", ")}`,
    [element("strong", {}, `${kept} of ${bars.length}`), " limits kept"],
    "A dot is a ratio of two medians of the same run, filled where it keeps its limit. The bar across its row is the limit, the strong side what it allows.",
  );
  const titles = [...new Set(runs.flatMap((run) => sectionsOf(run).map((s) => s.title)))];
  titles.forEach((title, i) => addBars(runs, title, `benchmark-${i + 1}`));
  const origin = section("How it was measured");
  for (const run of runs) {
    if (runs.length > 1) origin.append(element("h3", {}, run.name));
    origin.append(facts({ ...run.results.provenance, ...run.results.facts }));
  }
}

const keeps = (bar) => (bar.at_most ? bar.value <= bar.limit : bar.value >= bar.limit);

const sectionsOf = (run) => run.results.sections;
const barsIn = (section) => section.bars.filter((bar) => bar.value > 0 && bar.limit > 0);

function barsOf(runs, title) {
  return runs.flatMap((run, i) =>
    sectionsOf(run)
      .filter((s) => s.title === title)
      .flatMap(barsIn)
      .map((bar) => ({ ...bar, run: i })),
  );
}

function addBars(runs, title, id) {
  const bars = barsOf(runs, title);
  if (bars.length === 0) return;
  const made = section(title);
  addFigure(made, {
    id,
    title: `${bars.filter(keeps).length} of ${bars.length} limits kept`,
    alt: "One dot per ratio on a logarithmic axis; the line across its row is the limit.",
    draw: (svg, width) => drawBars(svg, width, runs, bars),
    rows: () => [
      ["run", "ratio of", "value", "limit", "at most"],
      ...bars.map((bar) => [runs[bar.run].name, bar.text, bar.value, bar.limit, bar.at_most]),
    ],
  });
  for (const run of runs) {
    const measured = sectionsOf(run).find((s) => s.title === title);
    if (!measured?.headers.length) continue;
    const caption = runs.length > 1 ? `${title}, ${run.name}` : title;
    made.append(
      element(
        "details",
        {},
        element("summary", {}, `Every measurement${runs.length > 1 ? `, ${run.name}` : ""}`),
        element("p", { class: "note" }, measured.note),
        table(caption, measured.headers, measured.rows),
      ),
    );
  }
}

const BAR_ROW = 44; // the name above, the dot below

function drawBars(svg, width, runs, bars) {
  const names = [...new Set(bars.map((bar) => bar.text))];
  const [top, bottom] = [10, 10 + names.length * BAR_ROW];
  svg.attr("height", bottom + MARGIN.bottom);
  const x = scaleOf({ log: true, domain: ([low, high]) => [low / 1.3, high * 1.3] }, bars.flatMap((b) => [b.value, b.limit, 1]), [8, width - 104]);
  const row = (bar) => top + names.indexOf(bar.text) * BAR_ROW;
  const axis = d3.axisBottom(x).tickValues(sizeTicks(logTicks(x), x, 36)).tickFormat(short).tickSizeOuter(0);
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom})`).call(axis);
  svg.append("text").attr("class", "unit").attr("x", width - 104).attr("y", bottom + 34).attr("text-anchor", "end").text("ratio");
  const targets = bars.map((bar) => drawBar(svg, width, bar, x, row(bar)));
  for (const bar of bars) drawLimit(svg, bar, x, row(bar));
  return {
    targets: targets.map((target, i) => ({
      ...target,
      title: bars[i].text,
      lines: [
        { name: runs[bars[i].run].name, value: fixed(bars[i].value, 2), colour: look(bars[i].run).colour },
        { name: keeps(bars[i]) ? "limit, kept" : "limit, missed", value: `${bars[i].at_most ? "≤" : "≥"} ${short(bars[i].limit)}` },
      ],
    })),
    nearest: (px, py) => d3.scan(targets, (a, b) => Math.hypot(a.x - px, a.y - py) - Math.hypot(b.x - px, b.y - py)),
    mark: (group, t) => group.append("circle").attr("class", "rim").attr("cx", t.x).attr("cy", t.y).attr("r", 9),
  };
}

function drawBar(svg, width, bar, x, top) {
  const y = top + 30;
  shorten(svg.append("text").attr("x", 8).attr("y", top + 14).text(bar.text), width - 8);
  svg.append("g").attr("class", "grid").append("line").attr("x1", x.range()[0]).attr("x2", x.range()[1]).attr("y1", y).attr("y2", y);
  const [from, to] = bar.at_most ? [x.range()[0], x(bar.limit)] : [x(bar.limit), x.range()[1]];
  svg.append("line").attr("class", "allowed").attr("x1", from).attr("x2", to).attr("y1", y).attr("y2", y);
  const { colour, symbol } = look(bar.run);
  const dot = svg.append("path").attr("class", "marker").attr("d", d3.symbol().type(symbol).size(80)).attr("transform", `translate(${x(bar.value)},${y})`);
  dot.style("stroke", `var(${keeps(bar) ? colour : "--mark"})`);
  // Filled where the limit is kept: not by colour alone.
  if (keeps(bar)) dot.style("fill", `var(${colour})`);
  svg.append("text").attr("x", width - 92).attr("y", y + 4).attr("font-weight", 600).text(fixed(bar.value, 2));
  svg.append("text").attr("class", "unit").attr("x", width - 50).attr("y", y + 4).text(`${bar.at_most ? "≤" : "≥"} ${short(bar.limit)}`);
  return { x: x(bar.value), y };
}

function drawLimit(svg, bar, x, top) {
  svg.append("line").attr("class", "rim").attr("x1", x(bar.limit)).attr("x2", x(bar.limit)).attr("y1", top + 20).attr("y2", top + 40);
}
