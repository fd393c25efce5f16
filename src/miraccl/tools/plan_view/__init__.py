"""Pictures of a plan: a plain SVG of the machine, and one self-contained HTML page to look into it.

``layout`` places the machine, ``svg`` draws it, ``page`` puts the page together from ``page.css`` and ``page.js``. All of them work
from the plan's JSON, so a saved plan can be drawn later and elsewhere.
"""

from __future__ import annotations

from miraccl.tools.plan_view.page import render_page
from miraccl.tools.plan_view.svg import render_svg

__all__ = ["render_page", "render_svg"]
