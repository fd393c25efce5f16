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
  const bound = plan.bound;
  if (bound) {
    card(num(bound.allReduce), "GB/s: ceiling of all-reduce (bus) without reducing switches");
    const mine = bound.plan.AllReduce;
    if (mine) card(num(mine.busBw), "GB/s this plan, " + mine.with + (mine.switchReduces ? " (the switch reduces)" : ""));
  }

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
      if (reasons) reasons.sentences.forEach((s) => panel.append(el("p", s, { class: "muted" })));
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
  setFit(true);
  if (plan.drawing.width > 1250) $("canvas").parentElement.classList.add("wide");
  $("clear").onclick = () => { shown.clear(); unpick(); drawChannels(); describeGraph(); };
  chooseGraph(graph);

  // Times

  const COLORS = { Tree: "#2f9e44", Ring: "#1971c2", CollNetDirect: "#e8590c", CollNetChain: "#f08c00", NVLS: "#862e9c", NVLSTree: "#c2255c", PAT: "#0c8599" };
  const DASHES = { LL: "2 3", LL128: "7 3", Simple: "" };
  const YAXES = { time: "time", algbw: "algorithm bandwidth", busbw: "bus bandwidth" };
  const n = plan.nranks;
  const FACTOR = { AllReduce: (2 * (n - 1)) / n, AllGather: (n - 1) / n, ReduceScatter: (n - 1) / n, Broadcast: 1, Reduce: 1 };
  let collective = "AllReduce";
  let axis = "time";
  const hidden = new Set();
  const W = 860, H = 400, L = 64, R = 16, T = 12, B = 58;

  const value = (t, size) => (axis === "time" ? t : (size / t / 1000) * (axis === "busbw" ? FACTOR[collective] : 1));
  const chart = () => {
    const holder = $("chart");
    holder.replaceChildren();
    const curves = explain ? explain.tuning.curves[collective] : {};
    const names = Object.keys(curves);
    if (!names.length || n < 2) {
      holder.append(el("p", explain ? "There is nothing to model here." : "This page was made without time curves.", { class: "muted" }));
      $("legend").replaceChildren();
      return;
    }
    const sizes = explain.tuning.sizes;
    const visible = names.filter((name) => !hidden.has(name));
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
      if (i % 3) return;
      svg.append(svgEl("line", { class: "grid", x1: x(size), x2: x(size), y1: T, y2: H - B }));
      svg.append(svgEl("text", { x: x(size), y: H - B + 30, "text-anchor": "middle" }, bytes(size)));
    });
    svg.append(svgEl("text", { x: L, y: H - 8 }, axis === "time" ? "time of one operation by size; below: the fastest" : "GB/s by size; below: the fastest"));
    sizes.forEach((size, i) => {
      const best = names.reduce((a, b) => (curves[b][i] < curves[a][i] ? b : a));
      const step = (x(sizes[1]) - x(sizes[0])) / 2;
      const left = Math.max(L, x(size) - step), right = Math.min(W - R, x(size) + step);
      svg.append(svgEl("rect", { x: left, y: H - B + 6, width: right - left + 0.3, height: 9, fill: COLORS[best.split("/")[0]] }));
    });
    names.forEach((name) => {
      const [algo, proto] = name.split("/");
      const d = curves[name].map((t, i) => (i ? "L" : "M") + x(sizes[i]).toFixed(1) + " " + y(value(t, sizes[i])).toFixed(1)).join("");
      const attrs = { class: "curve" + (hidden.has(name) ? " faint" : ""), d, stroke: COLORS[algo] || "#000", "stroke-dasharray": DASHES[proto] || "" };
      if (!hidden.has(name)) svg.append(svgEl("path", attrs));
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
      const row = el("tr", null, { class: (rank ? "" : "best") + (hidden.has(name) ? " hidden" : ""), title: "click to hide or show" });
      const sample = svgEl("svg", { width: 30, height: 8 });
      sample.append(svgEl("path", { d: "M0 4H30", stroke: COLORS[algo] || "#000", "stroke-width": 2.4, "stroke-dasharray": DASHES[proto] || "" }));
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
  const choices = () => {
    const table = el("table");
    const head = el("tr");
    ["size", "choice", "time", "channels", "warps", "why"].forEach((t) => head.append(el("th", t)));
    table.append(head);
    const reasons = explain ? explain.tuning.choices[collective] : [];
    plan.tuning.choice[collective].forEach((entry, i) => {
      const row = el("tr");
      if (!entry[1]) {
        row.append(el("td", bytes(entry[0])), el("td", "no algorithm is available", { colspan: 5, class: "muted" }));
        return table.append(row);
      }
      row.append(el("td", bytes(entry[0])), el("td", entry[1] + "/" + entry[2]), el("td", us(entry[3]), { class: "n" }));
      row.append(el("td", entry[4], { class: "n" }), el("td", entry[5], { class: "n" }), el("td", reasons[i] ? reasons[i].why || "" : ""));
      table.append(row);
    });
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
    chart();
    choices();
  };
  times();

  // The tree of a channel over nodes: a node's place is its number, its height its depth. Numbers at an edge are the ranks it joins.

  const MAX_TREE_NODES = 64;
  const nodeTree = (tree) => {
    const up = {};
    tree.up.forEach((parent, rank) => {
      const node = comm.rankToNode[rank];
      if (parent >= 0 && comm.rankToNode[parent] !== node) up[node] = { node: comm.rankToNode[parent], from: rank, to: parent };
    });
    const depth = (node) => (up[node] ? 1 + depth(up[node].node) : 0);
    return Array.from({ length: comm.nNodes }, (_, node) => ({ node, edge: up[node], depth: depth(node) }));
  };
  const drawNodeTrees = (channel) => {
    const step = comm.nNodes > 24 ? 34 : 58, row = 62;
    const nodes = nodeTree(comm.trees[channel]);
    const deepest = Math.max(...nodes.map((n) => n.depth));
    const width = Math.max(200, nodes.length * step + 20), height = (deepest + 1) * row + 8;
    const svg = svgEl("svg", { viewBox: "0 0 " + width + " " + height, width, height, role: "img", "aria-label": "tree of channel " + channel });
    const at = (n) => [10 + step / 2 + n.node * step, 24 + n.depth * row];
    nodes.forEach((n) => {
      if (!n.edge) return;
      const [x, y] = at(n), [px, py] = at(nodes[n.edge.node]);
      svg.append(svgEl("path", { class: "edge", stroke: "#2f9e44", d: "M" + x + " " + y + "C" + x + " " + (y - row / 2) + " " + px + " " + (py + row / 2) + " " + px + " " + py }));
      if (step > 40) svg.append(svgEl("text", { class: "via", x: (x + px) / 2, y: (y + py) / 2 + 3 }, n.edge.from + ">" + n.edge.to));
    });
    nodes.forEach((n) => {
      const [x, y] = at(n);
      svg.append(svgEl("circle", { cx: x, cy: y, r: step > 40 ? 14 : 11, fill: n.edge ? "#ebfbee" : "#2f9e44", stroke: "#2f9e44" }));
      const label = svgEl("text", { x, y: y + 4 }, n.node);
      if (!n.edge) label.setAttribute("style", "fill:#fff;font-weight:700");
      svg.append(label);
    });
    $("nodetrees").replaceChildren(el("p", "Tree of channel " + channel + " over the nodes", { class: "muted" }), svg);
    document.querySelectorAll("#nodetrees-channels button").forEach((b) => b.setAttribute("aria-pressed", String(Number(b.textContent) === channel)));
  };
  if (comm.trees && comm.nNodes > 1 && comm.nNodes <= MAX_TREE_NODES) {
    comm.trees.forEach((_, c) => {
      const b = el("button", c, { class: "channel", style: "--chip:#2f9e44", title: "tree of channel " + c });
      b.onclick = () => drawNodeTrees(c);
      $("nodetrees-channels").append(b);
    });
    drawNodeTrees(0);
  }

  // Rings and trees over all ranks

  const ranks = $("ranks");
  if (!comm.rings) {
    ranks.append(el("p", "There are too many ranks to list; the plan's JSON has them.", { class: "muted" }));
  } else {
    const rings = comm.rings.map((r, c) => String(c).padStart(3) + ": " + r.join(" ")).join("\n");
    const trees = comm.trees.map((tree, c) => {
      const inner = tree.down.map((d, r) => [r, d.filter((x) => x >= 0)]).filter(([, d]) => d.length);
      return String(c).padStart(3) + ": root " + tree.up.indexOf(-1) + "; " + inner.map(([r, d]) => r + "(" + d.join(" ") + ")").join(" ");
    }).join("\n");
    [["Rings, by channel", rings], ["Trees, by channel: parent(children)", trees]].forEach(([title, text], i) => {
      const d = el("details");
      if (!i) d.open = true;
      d.append(el("summary", title), el("pre", text));
      ranks.append(d);
    });
  }

  // Why

  const why = $("why");
  if (!explain) {
    why.append(el("p", "This page was made without reasons.", { class: "muted" }));
  } else {
    const stories = Object.entries(explain.sentences);
    if (bound) stories.push(["Bounds on bus bandwidth", bound.sentences]);
    stories.forEach(([heading, sentences], i) => {
      const d = el("details");
      if (heading !== "Search" && heading !== "Paths") d.open = true;
      const list = el("ul");
      sentences.forEach((s) => list.append(el("li", s)));
      d.append(el("summary", heading), list);
      why.append(d);
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
  document.body.dataset.ready = "yes";
})();
