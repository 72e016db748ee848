// A chart of several lines over time, drawn by uPlot in the page's colours. A canvas says nothing to a screen reader:
// the numbers stand beside it as text.
import { html, useEffect, useRef } from "/page/vendor/htm-preact-3.1.1.js";

const HEIGHT = 150;

// A colour of the style sheet, resolved for the theme of the moment.
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export function Chart({ title, lines, times, rows, theme, most, show }) {
  const place = useRef(null), chart = useRef(null);
  const names = lines.join(" ");
  useEffect(() => {
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const made = new uPlot({
      width: place.current.clientWidth || 300, height: HEIGHT, legend: { show: false }, cursor: { show: false },
      padding: [8, 8, 0, 0],
      scales: { y: { range: (u, low, high) => [0, most || Math.max(1, high * 1.1 || 1)] } },
      axes: [
        { ...axis, size: 24, space: 60, values: (u, splits) => splits.map((s) => new Date(s * 1000).toTimeString().slice(0, 8)) },
        { ...axis, size: 48, space: 30, values: (u, splits) => splits.map((s) => show(s)) },
      ],
      series: [{}, ...lines.map((label, i) => ({ label, stroke: colour(`c${i}`), width: 2, points: { show: false } }))],
    }, [times, ...rows], place.current);
    chart.current = made;
    const watch = new ResizeObserver(() => {
      const width = place.current.clientWidth;
      if (width && width !== made.width) made.setSize({ width, height: HEIGHT });
    });
    watch.observe(place.current);
    return () => { watch.disconnect(); made.destroy(); };
  }, [theme, names]);
  useEffect(() => { chart.current.setData([times, ...rows]); });
  return html`<figure class="chart">
    <figcaption>${title}
      <ul>${lines.map((line, i) => {
        const last = rows[i][rows[i].length - 1];
        return html`<li class="k${i}">${line} <b>${last == null ? "–" : show(last)}</b></li>`;
      })}</ul>
    </figcaption>
    <div class="plot" ref=${place} aria-hidden="true"></div>
  </figure>`;
}
