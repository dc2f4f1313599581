// Reads what a chart's curves are at the pointer; the numbers are those of metrics.jsonl.
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg.chart")) {
  const [low, high, start, stop] = svg.dataset.x.split(" ").map(Number);
  const cross = svg.querySelector(".cross"), box = svg.viewBox.baseVal;
  let curves = null;
  const read = () => [...svg.querySelectorAll("[data-points]")].map(path => ({
    name: path.dataset.name,
    hue: [...path.classList].find(name => /^c\d+$/.test(name)),
    points: path.dataset.points.split(" ").map(p => p.split(":")),
  }));
  const nearest = (points, step) => points.reduce((a, b) =>
    Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
  svg.addEventListener("pointermove", event => {
    curves ??= read();
    const place = svg.getBoundingClientRect();
    const x = (event.clientX - place.left) / place.width * box.width;
    const step = low + (x - start) / (stop - start) * (high - low);
    const found = curves.map(curve => ({...curve, at: nearest(curve.points, step)}));
    if (!found.length || x < start - 8) { tip.hidden = true; return; }
    const shown = found.reduce((a, b) =>
      Math.abs(b.at[0] - step) < Math.abs(a.at[0] - step) ? b : a).at[0];
    const there = start + (shown - low) / (high - low) * (stop - start);
    cross.setAttribute("d", `M${there} 10V${box.height - 24}`);
    tip.replaceChildren(...[`step ${shown}`, ...found].map(item => {
      const row = document.createElement("div");
      if (typeof item === "string") { row.textContent = item; return row; }
      const dot = document.createElement("i"), name = document.createElement("span");
      const value = document.createElement("b");
      dot.className = `dot ${item.hue}`;
      name.textContent = item.at[0] === shown ? item.name : `${item.name} (step ${item.at[0]})`;
      value.textContent = item.at[1] || "not finite";
      row.append(dot, name, value);
      return row;
    }));
    tip.hidden = false;
    const left = event.clientX + 14, width = tip.offsetWidth;
    const fits = left + width < document.documentElement.clientWidth;
    tip.style.left = `${Math.max(4, fits ? left : event.clientX - width - 14)}px`;
    tip.style.top = `${event.clientY + 12}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("d", ""); });
}
