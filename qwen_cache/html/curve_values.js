// The curves of report.html: the legend shows the values at the step nearest to the pointer, or of the last step.
"use strict";
for (const chart of document.querySelectorAll(".curves")) {
  const plot = chart.querySelector("svg"), rule = chart.querySelector(".rule"), grid = plot.viewBox.baseVal;
  const shown = chart.querySelectorAll(".value"), at = chart.querySelector(".at");
  const curves = [...chart.querySelectorAll("polyline")].map(({ dataset: { steps, values } }) =>
    ({ steps: steps.split(" ").map(Number), values: values.split(" ") }));
  const first = Math.min(...curves.map(({ steps }) => steps[0]));
  const last = Math.max(...curves.map(({ steps }) => steps.at(-1)));

  function nearest(steps, step) {
    return steps.reduce((best, each, i) => Math.abs(each - step) < Math.abs(steps[best] - step) ? i : best, 0);
  }

  function show(wanted) {
    const [{ steps }] = curves, step = wanted === last ? last : steps[nearest(steps, wanted)];
    at.textContent = step.toLocaleString("en");
    curves.forEach(({ steps, values }, i) => { shown[i].textContent = values[nearest(steps, step)]; });
    const fraction = last > first ? (step - first) / (last - first) : 0.5;
    rule.setAttribute("d", `M${grid.width * fraction} 0v${grid.height}`);
  }

  function follow({ clientX }) {
    const { left, width } = plot.getBoundingClientRect();
    show(first + ((last - first) * (clientX - left)) / width);
  }

  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerleave", ({ pointerType }) => {
    if (pointerType === "mouse") { show(last); rule.removeAttribute("d"); }
  });
}
