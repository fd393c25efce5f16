"""Pictures of a plan: a plain SVG of the machine, and a self-contained interactive HTML page.

``layout`` places the devices, ``svg`` draws them, ``page`` assembles the page with ``page.css`` and
``page.js``. All read the plan's JSON, so a saved plan can be drawn later on another machine.
"""

from __future__ import annotations

from miraccl.tools.plan_view.page import render_page
from miraccl.tools.plan_view.svg import render_svg

__all__ = ["render_page", "render_svg"]
