"""Picture of a schedule as a self-contained HTML page.

The step under the pointer shows its messages and its text.
"""

from __future__ import annotations

import re
from html import escape

from miraccl.schedule.ir import Schedule
from miraccl.tools.schedule_draw import draw_svg

_STYLE = """
body { margin: 0; font: 14px ui-sans-serif, Helvetica, Arial, sans-serif; color: #111; }
#picture { overflow-x: auto; padding-bottom: 5rem; }
#picture svg { display: block; }
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
  labels.setAttribute("transform", `translate(${picture.scrollLeft}, 0)`);
});
"""


def draw_html(schedule: Schedule, *, fold: bool | None = None) -> str:
    """Return a page with the picture of ``draw_svg``; it needs no network."""
    svg = draw_svg(schedule, fold=fold)
    # The page has a tooltip of its own; the title of the whole picture would cover it.
    svg = re.sub(r"<title>.*?</title>\n", "", svg, count=1)
    title = f"{schedule.name} {schedule.collective.label} over {schedule.nranks} ranks"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<div id="picture">
{svg}</div>
<div id="details" role="status">Point at a step, or tap it, to see its messages.</div>
<script>{_SCRIPT}</script>
</body>
</html>
"""
