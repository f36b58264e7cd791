"use strict";
// The charts of a page. Its text and tables are HTML already; of a live page, they are replaced as they change.
(() => {
  const DASHES = [[], [10, 5], [3, 3], [12, 4, 2, 4], [6, 3]];
  const root = document.documentElement, main = document.getElementById("main");
  const hidden = new Set(); // labels of the groups that are not shown
  let data = JSON.parse(document.getElementById("data").textContent);
  let charts = [];

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (place) => css(`--c${place % 8}`);
  const translucent = (hex, share) => hex + Math.round(share * 255).toString(16).padStart(2, "0");
  const shown = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return size !== 0 && (size < 1e-3 || size >= 1e4) ? value.toExponential(3) : value.toLocaleString("en", { minimumFractionDigits: 4, maximumFractionDigits: 4 });
  };

  // One chart: for each group three series (mean, low, high), then perhaps a level.
  class Chart {
    constructor(figure, spec) {
      this.figure = figure;
      this.place = figure.querySelector(".plot");
      this.readout = figure.querySelector(".readout");
      this.draw(spec);
      figure.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => this.zoom(button.dataset.zoom)));
      this.place.addEventListener("keydown", (event) => this.key(event));
      this.watcher = new ResizeObserver(() => this.resize());
      this.watcher.observe(this.place);
    }

    table(spec) {
      const tables = this.groups.map((group) => spec.curves[group]);
      const joined = tables.length > 1 ? uPlot.join(tables, tables.map((table) => table.map(() => 1))) : tables[0].slice();
      return spec.level ? [...joined, joined[0].map(() => spec.level.value)] : joined;
    }

    draw(spec) {
      const span = this.plot && this.zoomed ? { ...this.plot.scales.x } : null;
      this.plot?.destroy();
      this.spec = spec;
      this.groups = Object.keys(spec.curves).map(Number);
      this.values = this.table(spec);
      this.plot = new uPlot(this.options(spec), this.values, this.place);
      if (span) this.plot.setScale("x", { min: span.min, max: span.max });
      this.read(null);
    }

    update(spec) {
      const same = JSON.stringify([spec.scale, !!spec.level, Object.keys(spec.curves)]) === JSON.stringify([this.spec.scale, !!this.spec.level, this.groups.map(String)]);
      if (!same) return this.draw(spec);
      const span = this.zoomed ? { ...this.plot.scales.x } : null;
      this.spec = spec;
      this.values = this.table(spec);
      this.plot.setData(this.values, !span);
      if (span) this.plot.setScale("x", { min: span.min, max: span.max });
      this.read(this.plot.cursor.idx ?? null);
    }

    get zoomed() {
      const x = this.values[0], scale = this.plot.scales.x;
      return x.length > 1 && scale.min !== null && (scale.min > x[0] || scale.max < x[x.length - 1]);
    }

    options(spec) {
      const ink = css("--quiet"), grid = css("--soft"), font = "12px system-ui, sans-serif";
      const few = (this.values[0] || []).length <= 60;
      const paths = spec.steps ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
      const series = [{}], bands = [];
      this.groups.forEach((group) => {
        const stroke = color(group), show = this.isShown(group), single = data.groups[group].seeds === 1;
        series.push({ stroke, width: 2, dash: DASHES[group % 5], paths, show, points: { show: few && !spec.steps, size: 5, fill: stroke } });
        for (let edge = 0; edge < 2; edge++) series.push({ stroke: null, width: 0, points: { show: false }, show: show && !single, paths });
        const first = series.length - 3;
        if (!single) bands.push({ series: [first + 2, first + 1], fill: translucent(stroke, Number(css("--band"))) });
      });
      if (spec.level) series.push({ stroke: css("--quiet"), width: 1.5, dash: [2, 4], points: { show: false } });
      const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
      const count = (value) => (value === null ? "" : Math.abs(value) >= 1e6 ? value.toExponential(0) : value.toLocaleString("en", { maximumSignificantDigits: 5 }));
      const heat = spec.key.startsWith("heat-");
      return {
        width: Math.max(this.place.clientWidth, 120), height: this.place.clientHeight,
        legend: { show: false }, padding: [8, 24, 0, 0],
        cursor: { y: false, drag: { x: true, y: false, dist: 5 }, points: { size: 7 } },
        scales: heat
          ? { x: { time: false, distr: 3, log: 2, range: (u, low, high) => [low, high] }, y: { range: (u, low, high) => [0, high * 1.05] } }
          : { x: { time: false }, y: { distr: { linear: 1, log: 3, asinh: 4 }[spec.scale], asinh: 0.5 } },
        series, bands,
        axes: [
          { ...axis, label: spec.x, labelFont: font, labelSize: 18, size: 30, space: 60, values: (u, ticks) => ticks.map(count) },
          { ...axis, size: (u, values) => 14 + 7 * Math.max(2, ...(values || []).map((value) => (value || "").length)), values: (u, ticks) => ticks.map(count) },
        ],
        hooks: {
          setCursor: [(u) => this.read(u.cursor.idx ?? null)],
          setScale: [(u, name) => { if (name === "x") this.figure.dataset.span = `${u.scales.x.min} ${u.scales.x.max}`; }],
        },
      };
    }

    isShown(group) { return !hidden.has(data.groups[group].label); }

    toggle() {
      this.groups.forEach((group, place) => {
        const show = this.isShown(group), single = data.groups[group].seeds === 1, first = 1 + 3 * place;
        this.plot.setSeries(first, { show });
        for (const edge of [first + 1, first + 2]) this.plot.setSeries(edge, { show: show && !single });
      });
      this.read(this.plot.cursor.idx ?? null);
    }

    // The values at a point, or at the end, if that is what came of a run.
    read(at) {
      const told = at !== null || ["round", "megabytes"].includes(this.spec.x);
      const x = this.values[0];
      const place = at === null ? x.length - 1 : at;
      const parts = at === null ? [] : [`<span>${this.escape(this.spec.x)} <b>${shown(x[place])}</b></span>`];
      this.groups.filter((group) => this.isShown(group)).forEach((group) => {
        const first = 1 + 3 * this.groups.indexOf(group);
        const near = this.nearest(first, place, at === null);
        if (near === null) return;
        const [mean, low, high] = [0, 1, 2].map((edge) => this.values[first + edge][near]);
        const range = low === high || low === undefined ? "" : ` (${shown(low)} to ${shown(high)})`;
        const swatch = `<svg class="swatch c${group % 8} d${group % 5}" width="18" height="8"><line x1="0" y1="4" x2="18" y2="4"/></svg>`;
        parts.push(`<span>${swatch} ${data.groups.length > 1 ? this.escape(data.groups[group].label) + " " : ""}${told ? `<b>${shown(mean)}</b>${range}` : ""}</span>`);
      });
      if (this.spec.level) parts.push(`<span>┄ ${this.escape(this.spec.level.name)} <b>${shown(this.spec.level.value)}</b></span>`);
      this.readout.innerHTML = parts.join("");
    }

    // Curves have points at different places: the last one at or before this. After its end a curve has no value.
    nearest(series, place, ended) {
      const values = this.values[series], there = (at) => values[at] !== undefined && values[at] !== null;
      let at = place, after = place;
      while (at >= 0 && !there(at)) at--;
      while (after < values.length && !there(after)) after++;
      return at >= 0 && (ended || after < values.length) ? at : null;
    }

    escape(words) { const box = document.createElement("i"); box.textContent = words; return box.innerHTML; }

    zoom(how) {
      const x = this.values[0], [low, high] = [x[0], x[x.length - 1]];
      if (how === "all" || low === high) return this.plot.setData(this.values, true);
      const { min, max } = this.plot.scales.x, middle = (min + max) / 2, half = ((max - min) / 2) * (how === "in" ? 0.5 : 2);
      this.plot.setScale("x", { min: Math.max(middle - half, low), max: Math.min(middle + half, high) });
    }

    key(event) {
      const x = this.values[0], step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "+" || event.key === "-") return this.zoom(event.key === "+" ? "in" : "out");
      if (event.key === "Escape" || event.key === "0") return this.zoom("all");
      if (!step || !x.length) return;
      event.preventDefault();
      const at = Math.min(Math.max((this.plot.cursor.idx ?? (step > 0 ? -1 : x.length)) + step, 0), x.length - 1);
      this.plot.setCursor({ left: this.plot.valToPos(x[at], "x"), top: 10 });
    }

    resize() {
      const width = this.place.clientWidth, height = this.place.clientHeight;
      if (width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
    }

    end() { this.watcher.disconnect(); this.plot.destroy(); }
  }

  const start = () => {
    charts.forEach((chart) => chart.end());
    const specs = Object.fromEntries(data.charts.map((spec) => [spec.key, spec]));
    charts = [...main.querySelectorAll("[data-chart]")].map((figure) => new Chart(figure, specs[figure.dataset.chart]));
    main.querySelectorAll("[data-group]").forEach((button) => {
      const label = data.groups[Number(button.dataset.group)].label;
      button.setAttribute("aria-pressed", String(!hidden.has(label)));
      button.addEventListener("click", () => {
        hidden.has(label) ? hidden.delete(label) : hidden.add(label);
        button.setAttribute("aria-pressed", String(!hidden.has(label)));
        charts.forEach((chart) => chart.toggle());
      });
    });
  };

  // Dark and light: as the system says, until the button is pressed.
  const system = matchMedia("(prefers-color-scheme: dark)"), button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; }; // what it makes of the page
  const repaint = () => { name(); charts.forEach((chart) => chart.draw(chart.spec)); };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; repaint(); });
  system.addEventListener("change", repaint);

  // A live page asks again and again for what is new.
  const show = (news) => {
    const fresh = document.createElement("template");
    fresh.innerHTML = news.main;
    const keys = (place) => [...place.querySelectorAll("[data-part], [data-chart], section")].map((each) => each.dataset.part || each.dataset.chart || each.id).join("|");
    const stays = keys(fresh.content) === keys(main) && JSON.stringify(news.data.groups) === JSON.stringify(data.groups);
    data = news.data;
    document.title = news.title;
    if (!stays) {
      main.innerHTML = news.main;
      return start();
    }
    const old = main.querySelectorAll("[data-part]"), parts = fresh.content.querySelectorAll("[data-part]");
    old.forEach((part, place) => { if (part.innerHTML !== parts[place].innerHTML) part.innerHTML = parts[place].innerHTML; });
    const specs = Object.fromEntries(data.charts.map((spec) => [spec.key, spec]));
    charts.forEach((chart) => chart.update(specs[chart.spec.key]));
  };
  const follow = async (feed) => {
    let number = 0, failed = 0;
    for (;;) {
      try {
        const answer = await fetch(`${feed}?after=${number}`, { cache: "no-store" });
        if (!answer.ok) throw new Error(answer.statusText);
        const news = await answer.json();
        if (news.number !== number) show(news);
        number = news.number;
        failed = 0;
        document.body.dataset.feedState = "live";
      } catch (error) {
        failed += 1;
        document.body.dataset.feedState = "gone";
        const state = main.querySelector(".live .state span:last-child");
        if (failed > 1 && state) state.textContent = "`partwise watch` has ended; this is what it showed last";
        await new Promise((done) => setTimeout(done, Math.min(1000 * failed, 10000)));
      }
    }
  };

  start();
  name();
  document.body.dataset.ready = "yes";
  if (document.body.dataset.feed) follow(document.body.dataset.feed);
})();
