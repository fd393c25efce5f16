"""Picture of a schedule as a self-contained HTML page.

The step under the pointer shows its messages and its text.
"""

from __future__ import annotations

from html import escape

from miraccl.schedule.ir import Schedule
from miraccl.tools.schedule_draw import COLORS, Picture

_STYLE = """
body { margin: 0; font: 14px ui-sans-serif, Helvetica, Arial, sans-serif; color: #111; }
header, #legend { padding: 0 12px; }
h1 { font-size: 16px; margin: 14px 0 4px; overflow-wrap: anywhere; }
header p { margin: 0 0 4px; color: #555; font-size: 12px; }
#picture { overflow-x: auto; }
#picture svg { display: block; }
@media (min-width: 900px) {  /* fit the width, unless text would become too small */
  #picture svg { width: max(min(100%, var(--width)), calc(0.8 * var(--width))); height: auto; }
}
#legend { list-style: none; margin: 10px 0 5rem; font-size: 12.5px; line-height: 1.5;
  max-width: 46rem; }
#legend li { padding-left: 22px; text-indent: -22px; }
#legend span { display: inline-block; width: 11px; height: 11px; border: 1px solid;
  margin-right: 9px; border-radius: 2px; text-indent: 0; vertical-align: -1px; }
#legend span.none { border-color: transparent; }
.step { cursor: pointer; outline: none; }
.step:focus rect, .step.chosen rect { stroke-width: 3; }
.dim .step:not(.chosen):not(.linked), .dim .message:not(.linked) { opacity: 0.25; }
.message.linked { stroke: #000; stroke-width: 2.5; }
#details { position: fixed; bottom: 0; left: 0; right: 0; padding: 0.7rem 0.8rem;
  background: #fff; border-top: 1px solid #999; min-height: 1.2rem; overflow-wrap: anywhere; }
"""

_SCRIPT = """
const svg = document.querySelector("svg"), details = document.getElementById("details");
const picture = document.getElementById("picture"), labels = document.getElementById("labels");
const steps = [...svg.querySelectorAll(".step")], messages = [...svg.querySelectorAll(".message")];
const hint = details.textContent;
const titles = new Map(steps.map(step => [step.id, step.querySelector("title").textContent]));
let kept = null;  // chosen by a click
function show(step) {
  for (const part of svg.querySelectorAll(".chosen, .linked")) {
    part.classList.remove("chosen", "linked");
  }
  svg.classList.toggle("dim", step !== null);
  details.textContent = step === null ? hint : titles.get(step.id);
  if (step === null) return;
  step.classList.add("chosen");
  for (const message of messages) {
    const ends = message.dataset.ends.split(" ");
    if (!ends.includes(step.id)) continue;
    message.classList.add("linked");
    for (const end of ends) document.getElementById(end).classList.add("linked");
  }
}
for (const step of steps) {
  step.tabIndex = 0;
  step.addEventListener("pointerenter", () => show(step));
  step.addEventListener("focus", () => show(step));
  step.addEventListener("pointerleave", () => show(kept));
  step.addEventListener("click", event => {
    kept = kept === step ? null : step;
    show(kept);
    event.stopPropagation();
  });
}
svg.addEventListener("click", () => { kept = null; show(null); });
picture.addEventListener("scroll", () => {
  const left = picture.scrollLeft * svg.viewBox.baseVal.width / svg.clientWidth;
  labels.setAttribute("transform", `translate(${left}, 0)`);
});
"""


def draw_html(schedule: Schedule, *, fold: bool | None = None) -> str:
    """Return a page with the picture of ``draw_svg``; it needs no network."""
    picture = Picture(schedule, fold)
    svg = "\n".join(picture.render_body())
    title = escape(picture.title)
    legend = "\n".join(_legend_entry(kind, text) for kind, text in picture.legend())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{escape(picture.subtitle())}</p>
</header>
<div id="picture" style="--width: {picture.width}px">
{svg}
</div>
<ul id="legend">
{legend}
</ul>
<div id="details" role="status">Point at a step, or tap it, to see its messages.</div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _legend_entry(kind: str, text: str) -> str:
    if not kind:
        return f'<li><span class="none"></span>{escape(text)}</li>'
    fill, border = COLORS[kind]
    style = f"background:{fill};border-color:{border}"
    return f'<li><span style="{style}"></span>{escape(text)}</li>'
