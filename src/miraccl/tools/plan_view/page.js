"use strict";
// The page of one plan. Data comes from the element #plan; texts are only ever set as textContent.
(() => {
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const explain = plan.explain || null;
  const boxes = plan.drawing.boxes;
  const SVG = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);
  const el = (tag, text, attrs) => {
    const e = document.createElement(tag);
    if (text !== undefined && text !== null) e.textContent = text;
    for (const [k, v] of Object.entries(attrs || {})) e.setAttribute(k, v);
    return e;
  };
  const svgEl = (tag, attrs, text) => {
    const e = document.createElementNS(SVG, tag);
    for (const [k, v] of Object.entries(attrs)) e.setAttribute(k, v);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const num = (x, digits) => Number(x.toPrecision(digits || 4)).toString();
  const bytes = (n) => {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (n >= size) return num(n / size) + " " + unit;
    return n + " B";
  };
  const us = (t) => (t >= 1e6 ? num(t / 1e6) + " s" : t >= 1e3 ? num(t / 1e3) + " ms" : num(t) + " us");

  // Header

  const env = Object.entries(plan.env).map(([k, v]) => k + "=" + v).join(" ");
  $("settings").textContent =
    "decisions of NCCL " + plan.nccl_version + (env ? " with " + env : "") +
    (plan.domains.length > 1 ? " · only the network joins the " + plan.domains.length + " groups of GPUs of a machine; the first group is drawn" : "");
  const comm = plan.comm;
  const ring = plan.graphs[0];
  const card = (value, name) => {
    const c = el("div", null, { class: "card" });
    c.append(el("b", value), el("span", name));
    $("cards").append(c);
  };
  card(plan.nranks, plan.nranks === 1 ? "rank" : "ranks");
  card(comm.nNodes, comm.nNodes === 1 ? "node" : "nodes");
  card(comm.nChannels, "channels");
  card(ring.nChannels + " x " + num(ring.bwIntra), "ring channels x GB/s");
  card(comm.p2pnChannels + " / " + comm.p2pnChannelsPerPeer, "send-recv channels / per peer");
  card(comm.nvlsSupport ? comm.nvlsChannels : "off", "NVLS channels");

  // The ceiling and this plan, with their meaning beside them.

  const bound = plan.bound;
  const showBound = () => {
    const share = bound.plan.AllReduce;
    const line = (value, name, text, kind) => {
      const row = el("div", null, { class: "bound " + kind });
      const label = el("p");
      label.append(el("b", num(value) + " GB/s " + name), document.createTextNode(" " + text));
      const scale = el("div", null, { class: "scale" });
      const top = Math.max(bound.allReduce, share ? share.busBw : 0);
      scale.append(el("div", null, { class: "fill", style: "width:" + (100 * value) / top + "%" }));
      row.append(scale, label);
      $("bounds").append(row);
    };
    const more = bound.nodes < plan.nodes ? " (computed for " + bound.nodes + " nodes or more)" : "";
    line(bound.allReduce, "ceiling",
      "is the bus bandwidth that no all-reduce on this machine can exceed, whatever its algorithm, unless a " +
      "switch reduces: the narrowest cut through the links allows no more" + more + ".", "ceiling");
    if (!share) return;
    line(share.busBw, "this plan",
      "is the bus bandwidth that the model predicts for large all-reduces with " + share.with + ", " +
      Math.round(100 * share.share) + " % of the ceiling" +
      (share.switchReduces ? "; it may exceed it, because the switch reduces." : "."), "mine");
    $("bounds").append(el("p",
      "Bus bandwidth, as in nccl-tests: bytes of the operation per time, times " +
      num((2 * (plan.nranks - 1)) / plan.nranks, 3) + " for an all-reduce of " + plan.nranks + " ranks.",
      { class: "note" }));
  };
  if (bound) showBound();

  // Machine: channels

  const overlay = $("overlay");
  const machine = $("machine");
  const byRank = {};
  plan.system.GPU.forEach((gpu) => { byRank[gpu.rank] = boxes[plan.names.indexOf(gpu.name)]; });
  const byNet = {};
  plan.system.NET.forEach((net) => { if (!(net.id in byNet)) byNet[net.id] = boxes[plan.names.indexOf(net.name)]; });
  const graphs = plan.graphs.filter((g) => g.computed && g.nChannels);
  let graph = graphs[0];
  let shown = new Set();
  const color = (c) => "hsl(" + ((c * 360) / Math.max(1, graph.nChannels) + (c % 2) * 8) % 360 + " 75% 42%)";

  const marker = svgEl("marker", { id: "tip", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto-start-reverse" });
  marker.append(svgEl("path", { d: "M0 0L8 4L0 8z", fill: "context-stroke", style: "fill:context-stroke;opacity:1" }));
  const defs = svgEl("defs", {});
  defs.append(marker);
  machine.prepend(defs);

  // From one GPU down, across below all devices, and up into the other one. Each channel has its own place at a GPU.
  const arc = (a, b, c, dashed) => {
    const shift = (c - (graph.nChannels - 1) / 2) * Math.min(3.2, 60 / graph.nChannels);
    const x1 = a.x + shift, x2 = b.x + shift, top = plan.drawing.overlayTop;
    const room = plan.drawing.overlayBottom - top - 6;
    const depth = Math.min(room, 16 + Math.abs(x1 - x2) * 0.1 + (c % 8) * 4) * 1.25;
    const path = svgEl("path", {
      d: "M" + x1 + " " + (a.y + a.h / 2) + "L" + x1 + " " + top + "C" + x1 + " " + (top + depth) + " " + x2 + " " + (top + depth) + " " + x2 + " " + top +
        "L" + x2 + " " + (b.y + b.h / 2 + 2),
      stroke: color(c), "marker-end": "url(#tip)",
    });
    if (dashed) path.setAttribute("stroke-dasharray", "5 4");
    overlay.append(path);
  };
  const netArc = (from, to, c) => {
    const dy = (c % 5) * 3;
    const path = svgEl("path", {
      d: "M" + from.x + " " + (from.y + from.h / 2 - 6) + "C" + from.x + " " + (from.y + from.h / 2 + 40 + dy) + " " + to.x + " " + (to.y + to.h / 2 + 50 + dy) +
        " " + to.x + " " + (to.y + to.h / 2 + 1),
      stroke: color(c), "stroke-dasharray": "6 4", "marker-end": "url(#tip)",
    });
    overlay.append(path);
  };
  const drawChannel = (c) => {
    const order = graph.intra[c].map((rank) => byRank[rank]).filter(Boolean);
    const nets = graph.inter[c];
    if (graph.name === "nvls" || graph.name === "collnet_direct") {
      order.slice(1).forEach((gpu) => arc(gpu, order[0], c));
    } else {
      order.slice(1).forEach((gpu, i) => arc(order[i], gpu, c));
      if (graph.name === "ring" && !nets && order.length > 1) arc(order[order.length - 1], order[0], c);
    }
    if (nets && order.length) {
      const first = byNet[nets[0]], last = byNet[nets[1]];
      if (first) netArc(first, order[0], c);
      if (graph.name === "ring" && last) netArc(order[order.length - 1], last, c);
    }
  };
  const drawChannels = () => {
    overlay.replaceChildren();
    document.querySelectorAll(".box.head").forEach((b) => b.classList.remove("head"));
    [...shown].sort((a, b) => a - b).forEach(drawChannel);
    if (graph && (graph.name === "nvls" || graph.name.startsWith("collnet"))) {
      shown.forEach((c) => {
        const at = boxes.indexOf(byRank[graph.intra[c][0]]);
        const box = document.querySelector('.box[data-node="' + at + '"]');
        if (box) box.classList.add("head");
      });
    }
    document.querySelectorAll("button.channel").forEach((b) => b.setAttribute("aria-pressed", String(shown.has(Number(b.dataset.channel)))));
  };
  // Three lines on a search, and all of them behind a fold.
  const searchSummary = (reasons) => {
    const box = el("div", null, { class: "search" });
    (reasons.summary || reasons.sentences.slice(0, 3)).forEach((s) => box.append(el("p", s)));
    const fold = el("details");
    fold.append(el("summary", "how the search went (" + reasons.sentences.length + " lines)"));
    reasons.sentences.forEach((s) => fold.append(el("p", s, { class: "muted" })));
    box.append(fold);
    return box;
  };
  const describeGraph = () => {
    const panel = $("details");
    panel.replaceChildren();
    if (!graph) return panel.append(el("p", "No channels were found."));
    panel.append(el("h3", graph.name.replace("_", " ") + ": " + graph.nChannels + (graph.nChannels === 1 ? " channel" : " channels")));
    const inside = num(graph.bwIntra) + " GB/s per channel inside the node (" + graph.typeIntra + ")";
    panel.append(el("p", graph.inter.length ? inside + ", " + num(graph.bwInter) + " GB/s to the network (" + graph.typeInter + ")" : inside));
    const list = el("ol", null, { start: 0 });
    [...shown].sort((a, b) => a - b).forEach((c) => {
      const nets = graph.inter[c];
      const text = graph.intra[c].join(" → ");
      list.append(el("li", nets ? "net " + nets[0] + " → " + text + " → net " + nets[1] : text, { value: c, style: "color:" + color(c) }));
    });
    panel.append(list);
    if (explain) {
      const reasons = explain.search[0].find((r) => r.graph === graph.name);
      if (reasons) panel.append(searchSummary(reasons));
    }
    panel.append(el("p", "Click two devices to see the path between them.", { class: "muted" }));
  };
  const chooseGraph = (g) => {
    graph = g;
    shown = new Set(g ? [0] : []);
    $("graphs").replaceChildren(...graphs.map((other) => {
      const b = el("button", other.name.replace("_", " "), { "aria-pressed": String(other === g) });
      b.onclick = () => chooseGraph(other);
      return b;
    }));
    const chips = [];
    for (let c = 0; g && c < g.nChannels; c++) {
      const b = el("button", c, { class: "channel", "data-channel": c, "aria-pressed": "false", title: "channel " + c, style: "--chip:" + color(c) });
      b.onclick = () => { shown.has(c) ? shown.delete(c) : shown.add(c); unpick(); drawChannels(); describeGraph(); };
      chips.push(b);
    }
    const all = el("button", "all");
    all.onclick = () => { shown = new Set(Array.from({ length: g.nChannels }, (_, c) => c)); unpick(); drawChannels(); describeGraph(); };
    const none = el("button", "none");
    none.onclick = () => { shown.clear(); unpick(); drawChannels(); describeGraph(); };
    $("channels").replaceChildren(...chips, all, none);
    unpick();
    drawChannels();
    describeGraph();
  };

  // Machine: the path between two devices

  let picked = [];
  const unpick = () => {
    picked = [];
    document.querySelectorAll(".picked,.onpath").forEach((e) => e.classList.remove("picked", "onpath"));
    machine.classList.remove("dim");
  };
  const findPath = (a, b) => explain && explain.paths.find((p) => p.from === plan.names[a] && p.to === plan.names[b]);
  const showPath = (a, b) => {
    const panel = $("details");
    panel.replaceChildren();
    let path = findPath(a, b);
    if (!path) { path = findPath(b, a); }
    if (!path) {
      panel.append(el("h3", boxes[a].title + " to " + boxes[b].title));
      panel.append(el("p", explain ? "No path is computed between these two: paths start at a GPU or a net." : "This page was made without reasons."));
      return;
    }
    const label = (name) => { const i = plan.names.indexOf(name); return i < 0 ? name : boxes[i].title + " (" + name + ")"; };
    panel.append(el("h3", label(path.from) + " to " + label(path.to)));
    panel.append(el("p", path.type + ", " + num(path.bw) + " GB/s"));
    panel.append(el("p", "type: " + path.type_reason));
    panel.append(el("p", "bandwidth: " + path.bw_reason));
    const list = el("ol");
    path.hops.forEach((hop, i) => {
      const item = el("li", hop.link + " to " + label(hop.to) + ": " + hop.why);
      if (i === path.limit) item.style.fontWeight = "600";
      list.append(item);
      document.querySelectorAll(".wire." + hop.link).forEach((wire) => {
        const ends = [plan.names[wire.dataset.a], plan.names[wire.dataset.b]];
        if (ends.includes(hop.from) && ends.includes(hop.to) && hop.from !== hop.to) wire.classList.add("onpath");
      });
    });
    panel.append(list);
    path.rules.forEach((rule) => panel.append(el("p", rule.sentence + " (was " + rule.before[0] + " " + num(rule.before[1]) + " GB/s)")));
    machine.classList.add("dim");
  };
  document.querySelectorAll(".box").forEach((box) => {
    box.addEventListener("click", () => {
      const i = Number(box.dataset.node);
      if (picked.length !== 1) {
        unpick();
        shown.clear();
        drawChannels();
        $("details").replaceChildren(el("h3", boxes[i].title), el("p", plan.names[i]), el("p", "Click a second device.", { class: "muted" }));
      }
      if (picked.includes(i)) return;
      picked.push(i);
      box.classList.add("picked");
      if (picked.length === 2) showPath(picked[0], picked[1]);
    });
  });
  const fit = $("fit");
  const setFit = (on) => { fit.setAttribute("aria-pressed", String(on)); $("canvas").classList.toggle("fit", on); };
  fit.onclick = () => setFit(fit.getAttribute("aria-pressed") !== "true");
  // A drawing that would shrink to less than half its size is scrolled instead.
  setFit($("canvas").clientWidth > plan.drawing.width * 0.5);
  if (plan.drawing.width > 1250) $("canvas").parentElement.classList.add("wide");
  $("clear").onclick = () => { shown.clear(); unpick(); drawChannels(); describeGraph(); };
  chooseGraph(graph);

  // Times

  const COLORS = { Tree: "#2f9e44", Ring: "#1971c2", CollNetDirect: "#e8590c", CollNetChain: "#f08c00", NVLS: "#862e9c", NVLSTree: "#c2255c", PAT: "#0c8599" };
  const DASHES = { LL: "2 4", LL128: "9 4", Simple: "" };
  const MARKS = { LL: "circle", LL128: "triangle", Simple: "square" };
  const YAXES = { time: "time", algbw: "algorithm bandwidth", busbw: "bus bandwidth" };
  const n = plan.nranks;
  const FACTOR = { AllReduce: (2 * (n - 1)) / n, AllGather: (n - 1) / n, ReduceScatter: (n - 1) / n, Broadcast: 1, Reduce: 1 };
  let collective = "AllReduce";
  let axis = "time";
  const hidden = new Set();
  const offProtocols = new Set();
  const isHidden = (name) => hidden.has(name) || offProtocols.has(name.split("/")[1]);
  const H = 400, L = 64, R = 16, T = 12, B = 58;
  let W = 860;  // narrower on a phone, so that text keeps its size

  const value = (t, size) => (axis === "time" ? t : (size / t / 1000) * (axis === "busbw" ? FACTOR[collective] : 1));
  // Protocols have marks and dashes of their own, algorithms have colours.
  const mark = (proto, x, y, fill) => {
    if (MARKS[proto] === "circle") return svgEl("circle", { class: "mark", cx: x, cy: y, r: 3.4, fill: "#fff", stroke: fill });
    if (MARKS[proto] === "triangle") return svgEl("path", { class: "mark", d: "M" + x + " " + (y - 4.6) + "l4.4 7.8h-8.8z", fill, stroke: fill });
    return svgEl("rect", { class: "mark", x: x - 3.2, y: y - 3.2, width: 6.4, height: 6.4, fill, stroke: fill });
  };
  const chart = () => {
    const holder = $("chart");
    holder.replaceChildren();
    W = Math.min(860, Math.max(300, holder.clientWidth || 860));
    const narrow = W < 560;
    const curves = explain ? explain.tuning.curves[collective] : {};
    const names = Object.keys(curves);
    if (!names.length || n < 2) {
      holder.append(el("p", explain ? "There is nothing to model here." : "This page was made without time curves.", { class: "muted" }));
      $("legend").replaceChildren();
      return;
    }
    const sizes = explain.tuning.sizes;
    const visible = names.filter((name) => !isHidden(name));
    const all = (visible.length ? visible : names).flatMap((name) => curves[name].map((t, i) => value(t, sizes[i]))).filter((v) => v > 0);
    const y0 = Math.floor(Math.log10(Math.min(...all))), y1 = Math.max(y0 + 1, Math.ceil(Math.log10(Math.max(...all))));
    const x = (size) => L + ((Math.log2(size) - 3) / (Math.log2(sizes[sizes.length - 1]) - 3)) * (W - L - R);
    const y = (v) => T + (1 - (Math.log10(v) - y0) / (y1 - y0)) * (H - T - B);
    const svg = svgEl("svg", { viewBox: "0 0 " + W + " " + H, role: "img", "aria-label": collective + " " + YAXES[axis] });
    for (let e = y0; e <= y1; e++) {
      svg.append(svgEl("line", { class: "grid", x1: L, x2: W - R, y1: y(10 ** e), y2: y(10 ** e) }));
      svg.append(svgEl("text", { x: L - 6, y: y(10 ** e) + 4, "text-anchor": "end" }, axis === "time" ? us(10 ** e) : num(10 ** e)));
    }
    sizes.forEach((size, i) => {
      if (i % (narrow ? 6 : 3)) return;
      svg.append(svgEl("line", { class: "grid", x1: x(size), x2: x(size), y1: T, y2: H - B }));
      svg.append(svgEl("text", { x: x(size), y: H - B + 30, "text-anchor": "middle" }, bytes(size)));
    });
    svg.append(svgEl("text", { x: narrow ? 4 : L, y: H - 8 }, (axis === "time" ? "time of one operation" : "GB/s") + " by size; the bar names the fastest"));
    // The fastest at each size, as a bar with names.
    const step = (x(sizes[1]) - x(sizes[0])) / 2;
    const bestAt = sizes.map((_, i) => names.reduce((a, b) => (curves[b][i] < curves[a][i] ? b : a)));
    for (let i = 0; i < sizes.length; ) {
      let end = i;
      while (end + 1 < sizes.length && bestAt[end + 1] === bestAt[i]) end++;
      const left = Math.max(L, x(sizes[i]) - step), right = Math.min(W - R, x(sizes[end]) + step);
      svg.append(svgEl("rect", { class: "best", x: left, y: H - B + 4, width: right - left - 1, height: 15, fill: COLORS[bestAt[i].split("/")[0]] }));
      const label = [bestAt[i], bestAt[i].split("/")[1]].find((text) => text.length * 6.2 < right - left - 6);
      if (label) svg.append(svgEl("text", { class: "bestname", x: (left + right) / 2, y: H - B + 15, "text-anchor": "middle" }, label));
      i = end + 1;
    }
    names.filter((name) => !isHidden(name)).forEach((name, k) => {
      const [algo, proto] = name.split("/");
      const points = curves[name].map((t, i) => [x(sizes[i]), y(value(t, sizes[i]))]);
      const d = points.map(([px, py], i) => (i ? "L" : "M") + px.toFixed(1) + " " + py.toFixed(1)).join("");
      svg.append(svgEl("path", { class: "curve", d, stroke: COLORS[algo] || "#000", "stroke-dasharray": DASHES[proto] || "" }));
      points.forEach(([px, py], i) => { if (i % 5 === k % 5) svg.append(mark(proto, px, py, COLORS[algo] || "#000")); });
    });
    const line = svgEl("line", { x1: 0, x2: 0, y1: T, y2: H - B, stroke: "#495057", visibility: "hidden" });
    svg.append(line);
    const at = (i) => {
      line.setAttribute("visibility", "visible");
      line.setAttribute("x1", x(sizes[i]));
      line.setAttribute("x2", x(sizes[i]));
      legend(i);
    };
    svg.addEventListener("mousemove", (event) => {
      const rect = svg.getBoundingClientRect();
      const px = ((event.clientX - rect.left) / rect.width) * W;
      let best = 0;
      sizes.forEach((size, i) => { if (Math.abs(x(size) - px) < Math.abs(x(sizes[best]) - px)) best = i; });
      at(best);
    });
    holder.append(svg);
    at(Math.min(sizes.length - 1, 17));
  };
  const legend = (i) => {
    const curves = explain.tuning.curves[collective];
    const size = explain.tuning.sizes[i];
    const names = Object.keys(curves).sort((a, b) => curves[a][i] - curves[b][i]);
    const table = el("table");
    names.forEach((name, rank) => {
      const [algo, proto] = name.split("/");
      const row = el("tr", null, { class: (rank ? "" : "best") + (isHidden(name) ? " hidden" : ""), title: "click to hide or show" });
      const sample = svgEl("svg", { width: 44, height: 12 });
      sample.append(svgEl("path", { d: "M0 6H44", stroke: COLORS[algo] || "#000", "stroke-width": 2.2, "stroke-dasharray": DASHES[proto] || "" }));
      sample.append(mark(proto, 22, 6, COLORS[algo] || "#000"));
      const key = el("td");
      key.append(sample);
      const bw = size / curves[name][i] / 1000;
      row.append(key, el("td", name), el("td", us(curves[name][i])), el("td", num(bw * FACTOR[collective], 3) + " GB/s bus"));
      row.onclick = () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); chart(); legend(i); };
      table.append(row);
    });
    $("legend").replaceChildren(el("h3", collective + " of " + bytes(size)), table);
    const off = explain.tuning.choices[collective].length ? explain.tuning.choices[collective][0].off : {};
    const reasons = {};
    Object.entries(off).forEach(([name, why]) => { (reasons[why] = reasons[why] || []).push(name); });
    Object.entries(reasons).forEach(([why, list]) => $("legend").append(el("p", list.join(", ") + ": " + why, { class: "muted" })));
  };
  // Successive sizes with one choice make one row; its reason is in a row of its own.
  const choices = () => {
    const table = el("table");
    const head = el("tr");
    ["sizes", "choice", "time", "channels", "warps"].forEach((t) => head.append(el("th", t)));
    table.append(head);
    const reasons = explain ? explain.tuning.choices[collective] : [];
    const entries = plan.tuning.choice[collective];
    const range = (a, b) => (a === b ? String(a) : a + " to " + b);
    for (let i = 0; i < entries.length; ) {
      let end = i;
      while (end + 1 < entries.length && entries[end + 1][1] === entries[i][1] && entries[end + 1][2] === entries[i][2]) end++;
      const first = entries[i], last = entries[end];
      const row = el("tr", null, { class: "choice" });
      row.append(el("td", range(bytes(first[0]), bytes(last[0]))));
      if (first[1]) {
        const name = el("td");
        name.append(el("span", "", { class: "dot", style: "background:" + (COLORS[first[1]] || "#000") }), document.createTextNode(first[1] + "/" + first[2]));
        row.append(name, el("td", range(us(first[3]), us(last[3]))), el("td", range(first[4], last[4])), el("td", range(first[5], last[5])));
      } else {
        row.append(el("td", "no algorithm is available", { colspan: 4, class: "muted" }));
      }
      table.append(row);
      if (reasons[i] && reasons[i].why) {
        const why = el("tr", null, { class: "reason" });
        why.append(el("td", reasons[i].why, { colspan: 5 }));
        table.append(why);
      }
      i = end + 1;
    }
    $("choices").replaceChildren(table);
  };
  const times = () => {
    $("collectives").replaceChildren(...Object.keys(plan.tuning.choice).map((name) => {
      const b = el("button", name, { "aria-pressed": String(name === collective) });
      b.onclick = () => { collective = name; times(); };
      return b;
    }));
    $("axes").replaceChildren(...Object.entries(YAXES).map(([key, name]) => {
      const b = el("button", name, { "aria-pressed": String(key === axis) });
      b.onclick = () => { axis = key; times(); };
      return b;
    }));
    $("protocols").replaceChildren(...Object.keys(DASHES).map((name) => {
      const b = el("button", null, { "aria-pressed": String(!offProtocols.has(name)), class: "protocol" });
      const sample = svgEl("svg", { width: 34, height: 10 });
      sample.append(svgEl("path", { d: "M0 5H34", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": DASHES[name] }));
      sample.append(mark(name, 17, 5, "currentColor"));
      b.append(sample, document.createTextNode(name));
      b.onclick = () => { offProtocols.has(name) ? offProtocols.delete(name) : offProtocols.add(name); times(); };
      return b;
    }));
    chart();
    choices();
  };
  times();
  window.addEventListener("resize", chart);

  // Rings and trees of a channel over the nodes. Numbers in a node are local ranks, in the order of the channel.

  const MAX_NODES_DRAWN = 64;
  const RING = "#1971c2", TREE = "#2f9e44";
  const firstRank = {};
  if (comm.rankToNode) comm.rankToNode.forEach((node, rank) => { if (!(node in firstRank)) firstRank[node] = rank; });
  const arrow = (id, fill) => {
    const tip = svgEl("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
    tip.append(svgEl("path", { d: "M0 0L8 4L0 8z", fill }));
    const holder = svgEl("defs", {});
    holder.append(tip);
    return holder;
  };
  // The ring as visits of nodes, from where it enters the first one: {node, ranks}.
  const visits = (ring) => {
    const nodeOf = (rank) => comm.rankToNode[rank];
    let start = ring.findIndex((rank, i) => nodeOf(rank) !== nodeOf(ring[(i + ring.length - 1) % ring.length]));
    if (start < 0) start = 0;
    const result = [];
    for (let i = 0; i < ring.length; i++) {
      const rank = ring[(start + i) % ring.length];
      const last = result[result.length - 1];
      if (last && last.node === nodeOf(rank)) last.ranks.push(rank);
      else result.push({ node: nodeOf(rank), ranks: [rank] });
    }
    return result;
  };
  // Rows of nodes, left to right and back in turn, so that the ring closes on the left.
  const drawRing = (channel) => {
    const stops = visits(comm.rings[channel]);
    const longest = Math.max(...stops.map((s) => s.ranks.length));
    const perLine = Math.min(longest, 8), lines = Math.ceil(longest / perLine);
    const narrow = $("shape").clientWidth < 600;
    const chip = narrow ? 15.5 : 19, gapX = narrow ? 22 : 34, gapY = 34, left = narrow ? 22 : 30;
    const boxW = Math.max(66, perLine * chip + 12), boxH = 26 + lines * 22;
    const columns = Math.max(1, Math.min(stops.length, Math.floor(($("shape").clientWidth - left - 10 + gapX) / (boxW + gapX))));
    const rows = Math.ceil(stops.length / columns);
    const width = left + columns * (boxW + gapX) - gapX + 12, height = rows * (boxH + gapY) - gapY + 12;
    const svg = svgEl("svg", { viewBox: "0 0 " + width + " " + height, width, height, role: "img", "aria-label": "ring of channel " + channel });
    svg.append(arrow("ring-tip", RING));
    const place = (i) => {
      const row = Math.floor(i / columns), column = row % 2 ? columns - 1 - (i % columns) : i % columns;
      return { x: left + column * (boxW + gapX), y: 6 + row * (boxH + gapY), row, back: row % 2 === 1 };
    };
    const link = (d) => svg.append(svgEl("path", { class: "edge", d, stroke: RING, "marker-end": "url(#ring-tip)" }));
    stops.forEach((stop, i) => {
      const at = place(i), middle = at.y + boxH / 2;
      if (i + 1 < stops.length) {
        const next = place(i + 1);
        if (next.row === at.row) link("M" + (at.back ? at.x : at.x + boxW) + " " + middle + "H" + (at.back ? next.x + boxW + 1 : next.x - 1));
        else link("M" + (at.x + boxW / 2) + " " + (at.y + boxH) + "V" + (next.y - 1));
      } else if (stops.length > 1) {
        const first = place(0), x = at.back || columns === 1 ? at.x : at.x + boxW / 2;
        if (at.row === 0 && columns > 1) link("M" + (at.x + boxW / 2) + " " + (at.y + boxH) + "v9H" + (first.x + boxW / 2) + "v-8");
        else if (at.back || columns === 1) link("M" + x + " " + middle + "H8V" + (first.y + boxH / 2) + "H" + (first.x - 1));
        else link("M" + x + " " + (at.y + boxH) + "v4H8V" + (first.y + boxH / 2) + "H" + (first.x - 1));
      }
    });
    stops.forEach((stop, i) => {
      const at = place(i);
      svg.append(svgEl("rect", { class: "node", x: at.x, y: at.y, width: boxW, height: boxH, rx: 7 }));
      svg.append(svgEl("text", { class: "name", x: at.x + boxW / 2, y: at.y + 15 }, comm.nNodes > 1 ? "node " + stop.node : "GPUs"));
      stop.ranks.forEach((rank, k) => {
        const line = Math.floor(k / perLine), count = Math.min(perLine, stop.ranks.length - line * perLine);
        const position = at.back ? count - 1 - (k % perLine) : k % perLine;
        const x = at.x + boxW / 2 + (position - (count - 1) / 2) * chip, y = at.y + 31 + line * 22;
        const end = k === 0 ? " enter" : k === stop.ranks.length - 1 ? " leave" : "";
        svg.append(svgEl("circle", { class: "chip" + end, cx: x, cy: y, r: chip / 2 - 1.1 }));
        svg.append(svgEl("text", { class: "chip" + end, x, y: y + 3.5 }, rank - firstRank[stop.node]));
      });
    });
    if (rows * columns && stops.length > 1 && rows === 1) svg.setAttribute("viewBox", "0 0 " + width + " " + (height + 12));
    return svg;
  };
  const nodeTree = (tree) => {
    const up = {};
    tree.up.forEach((parent, rank) => {
      const node = comm.rankToNode[rank];
      if (parent >= 0 && comm.rankToNode[parent] !== node) up[node] = { node: comm.rankToNode[parent], from: rank, to: parent };
    });
    const depth = (node) => (up[node] ? 1 + depth(up[node].node) : 0);
    return Array.from({ length: comm.nNodes }, (_, node) => ({ node, edge: up[node], depth: depth(node) }));
  };
  // A node's place is its number, its height its depth. Numbers at an edge are the ranks it joins.
  const drawTree = (channel) => {
    const step = comm.nNodes > 24 ? 34 : 58, row = 62;
    const nodes = nodeTree(comm.trees[channel]);
    const deepest = Math.max(...nodes.map((n) => n.depth));
    const width = Math.max(200, nodes.length * step + 20), height = (deepest + 1) * row + 8;
    const svg = svgEl("svg", { viewBox: "0 0 " + width + " " + height, width, height, role: "img", "aria-label": "tree of channel " + channel });
    const at = (n) => [10 + step / 2 + n.node * step, 24 + n.depth * row];
    nodes.forEach((n) => {
      if (!n.edge) return;
      const [x, y] = at(n), [px, py] = at(nodes[n.edge.node]);
      svg.append(svgEl("path", { class: "edge", stroke: TREE, d: "M" + x + " " + y + "C" + x + " " + (y - row / 2) + " " + px + " " + (py + row / 2) + " " + px + " " + py }));
      if (step > 40) svg.append(svgEl("text", { class: "via", x: (x + px) / 2, y: (y + py) / 2 + 3 }, n.edge.from + ">" + n.edge.to));
    });
    nodes.forEach((n) => {
      const [x, y] = at(n);
      svg.append(svgEl("circle", { cx: x, cy: y, r: step > 40 ? 14 : 11, fill: n.edge ? "#ebfbee" : TREE, stroke: TREE }));
      const label = svgEl("text", { x, y: y + 4 }, n.node);
      if (!n.edge) label.setAttribute("style", "fill:#fff;font-weight:700");
      svg.append(label);
    });
    return svg;
  };
  const SHAPES = {
    ring: { draw: drawRing, rows: comm.rings || [], color: RING, text: "Ring", help: "Each box is a node with its GPUs by local rank, in the order of the ring: it enters at the ringed GPU and leaves by the filled one." },
    tree: { draw: drawTree, rows: comm.trees || [], color: TREE, text: "Tree", help: "The root is filled; the numbers at an edge are the ranks that it joins." },
  };
  let shape = "ring", shapeChannel = 0;
  const showShape = () => {
    const { draw, rows, color, text, help } = SHAPES[shape];
    const key = JSON.stringify(rows[shapeChannel]);
    const equal = rows.map((_, c) => c).filter((c) => c !== shapeChannel && JSON.stringify(rows[c]) === key);
    const title = text + " of channel " + shapeChannel + (equal.length ? ", equal to " + (equal.length > 1 ? "channels " : "channel ") + equal.join(", ") : "");
    $("shape").replaceChildren(el("p", title + ". " + help, { class: "muted" }));
    $("shape").append(draw(shapeChannel));
    $("shapes").replaceChildren(...Object.keys(SHAPES).filter((name) => name === "ring" || comm.nNodes > 1).map((name) => {
      const b = el("button", name, { "aria-pressed": String(name === shape) });
      b.onclick = () => { shape = name; showShape(); };
      return b;
    }));
    $("shape-channels").replaceChildren(...rows.map((_, c) => {
      const b = el("button", c, { class: "channel", style: "--chip:" + color, title: shape + " of channel " + c, "aria-pressed": String(c === shapeChannel) });
      b.onclick = () => { shapeChannel = c; showShape(); };
      return b;
    }));
  };
  const ranks = $("ranks");
  if (!comm.rings) {
    ranks.append(el("p", "There are too many ranks to draw; the plan's JSON has them.", { class: "muted" }));
  } else {
    if (comm.nNodes <= MAX_NODES_DRAWN) {
      showShape();
      window.addEventListener("resize", () => { if (shape === "ring") showShape(); });
    } else {
      $("shape").append(el("p", "More than " + MAX_NODES_DRAWN + " nodes are not drawn.", { class: "muted" }));
    }
    const rings = comm.rings.map((r, c) => String(c).padStart(3) + ": " + r.join(" ")).join("\n");
    const trees = comm.trees.map((tree, c) => {
      const inner = tree.down.map((d, r) => [r, d.filter((x) => x >= 0)]).filter(([, d]) => d.length);
      return String(c).padStart(3) + ": root " + tree.up.indexOf(-1) + "; " + inner.map(([r, d]) => r + "(" + d.join(" ") + ")").join(" ");
    }).join("\n");
    [["Ranks of all rings", rings], ["Ranks of all trees: parent(children)", trees]].forEach(([title, text]) => {
      const d = el("details");
      d.append(el("summary", title), el("pre", text));
      ranks.append(d);
    });
  }

  // Why

  const why = $("why");
  if (!explain) {
    why.append(el("p", "This page was made without reasons.", { class: "muted" }));
  } else {
    const sections = Object.entries(explain.sentences).filter(([heading]) => heading !== "Search");
    if (bound) sections.push(["Bounds on bus bandwidth", bound.sentences]);
    const SHOWN = 3; // lines of a list that is folded
    sections.forEach(([heading, sentences]) => {
      const items = sentences.map((s) => el("li", s));
      const list = el("ul");
      list.append(...items.slice(0, SHOWN));
      why.append(el("h3", heading), list);
      if (items.length > SHOWN) {
        const d = el("details"), rest = el("ul");
        rest.append(...items.slice(SHOWN));
        d.append(el("summary", items.length - SHOWN + " more"), rest);
        why.append(d);
      }
    });
    why.append(el("h3", "Search"));
    explain.search[0].filter((g) => g.sentences.length).forEach((g) => {
      why.append(el("h4", g.graph.replace("_", " ")), searchSummary(g));
    });
    explain.search[0].filter((g) => g.tries.length).forEach((g) => {
      const d = el("details");
      const table = el("table");
      const head = el("tr");
      ["pass", "asked for and what came of it", "visits", "better"].forEach((t) => head.append(el("th", t)));
      table.append(head);
      g.tries.forEach((t) => {
        const row = el("tr");
        row.append(el("td", t.pass, { class: "n" }), el("td", t.sentence), el("td", t.visits, { class: "n" }), el("td", t.improved ? "yes" : ""));
        table.append(row);
      });
      const scroll = el("div", null, { class: "scroll" });
      scroll.append(table);
      d.append(el("summary", "Every walk of the " + g.graph.replace("_", " ") + " search (" + g.walks + (g.walks > g.tries.length ? ", of which " + g.tries.length + " are listed" : "") + ")"), scroll);
      why.append(d);
    });
  }

  // On paper nothing can be unfolded: show the lists, but not the tables of walks.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("#why details").forEach((d) => { if (!d.querySelector("table")) d.open = true; });
  });
  document.body.dataset.ready = "yes";
})();
