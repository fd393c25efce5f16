"""The channel graph record and its JSON and XML forms."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import TopologyError
from miraccl.graph.channel_graph import (
    MAX_CHANNELS,
    ChannelGraph,
    graph_from_json,
    graph_to_json,
    graphs_from_xml,
    graphs_to_xml,
    start_graph,
)
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.topo.records import GpuNode, NetNode, PathType, System, f32
from tests.graph.golden import sample
from tests.topo.golden import GoldenCase


def machine(ngpus: int, inter: int) -> System:
    """GPUs whose device numbers differ from their ranks, and two nets."""
    gpus = tuple(
        GpuNode(id=0x1000 * (g + 1), dev=ngpus - 1 - g, rank=g, sm=80) for g in range(ngpus)
    )
    return System(nodes=(*gpus, NetNode(id=0, dev=0), NetNode(id=17, dev=17)), inter=inter)


floats = st.just(0.0) | st.floats(2**-16, 5000, width=32)


@st.composite
def channel_graphs(draw: st.DrawFn) -> tuple[ChannelGraph, System]:
    ngpus, inter, count = draw(st.integers(1, 8)), draw(st.integers(0, 1)), draw(st.integers(0, 6))
    kind = draw(st.sampled_from(GraphKind))
    steps = 1 if kind is GraphKind.NVLS else ngpus
    graph = ChannelGraph(
        kind=kind,
        pattern=Pattern.TREE
        if kind is GraphKind.TREE and ngpus == 1
        else draw(st.sampled_from(Pattern)),
        bw_intra=draw(floats),
        bw_inter=draw(floats),
        latency_inter=draw(floats),
        type_intra=draw(st.sampled_from(PathType)),
        type_inter=draw(st.sampled_from(PathType)),
        same_channels=draw(st.integers(0, 1)),
        cross_nic=draw(st.integers(0, 2)),
        n_hops=draw(st.integers(0, 500)),
        intra=tuple(tuple(draw(st.permutations(range(ngpus)))[:steps]) for _ in range(count)),
        inter=tuple(
            (draw(st.sampled_from((0, 17))), draw(st.sampled_from((0, 17)))) for _ in range(count)
        )
        if inter
        else (),
    )
    return graph, machine(ngpus, inter)


@given(channel_graphs())
def test_json_round_trip(result: tuple[ChannelGraph, System]) -> None:
    graph, _ = result
    assert graph_from_json(graph_to_json(graph)) == graph


@given(channel_graphs())
def test_xml_round_trip(result: tuple[ChannelGraph, System]) -> None:
    graph, system = result
    (back,) = graphs_from_xml(graphs_to_xml([graph], system), system).values()
    start = start_graph(graph.kind, graph.n_channels)
    for name in ("bw_intra", "bw_inter", "latency_inter"):
        assert getattr(back, name) == pytest.approx(
            getattr(graph, name), rel=1e-5
        )  # six digits, as %g has
        graph = replace(graph, **{name: getattr(back, name)})
    assert back == replace(
        graph, n_hops=0, min_channels=start.min_channels, max_channels=start.max_channels
    )


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(every=40))
def test_recorded_graphs_survive_json(case: GoldenCase) -> None:
    for graph in case.load()["graphs"]:
        assert graph_to_json(graph_from_json(graph)) == graph


def test_xml_layout_is_that_of_nccl() -> None:
    ring = ChannelGraph(
        kind=GraphKind.RING,
        pattern=Pattern.RING,
        bw_intra=f32(20.6),
        bw_inter=12.0,
        type_intra=PathType.NVL,
        type_inter=PathType.PXN,
        same_channels=1,
        intra=((1, 0),),
        inter=((17, 0),),
    )
    empty = start_graph(GraphKind.NVLS, 1)
    assert graphs_to_xml([empty, ring], machine(2, 1)) == (
        '<graphs version="1">\n'
        '  <graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="20.6" '
        'speedinter="12" latencyinter="0" '
        'typeintra="NVL" typeinter="PXN" samechannels="1">\n'
        "    <channel>\n"
        '      <net dev="0x11"/>\n'
        '      <gpu dev="0"/>\n'
        '      <gpu dev="0x1"/>\n'
        '      <net dev="0"/>\n'
        "    </channel>\n"
        "  </graph>\n"
        '  <graph id="3" pattern="5" crossnic="0" nchannels="0" speedintra="0" speedinter="0" '
        'latencyinter="0" '
        'typeintra="LOC" typeinter="LOC" samechannels="0"/>\n'
        "</graphs>\n"
    )


GRAPH = (
    '<graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="1" speedinter="1" '
    'typeintra="NVL" typeinter="PIX" samechannels="1">'
)

NVLS = GRAPH.replace('id="0" pattern="4"', 'id="3" pattern="5"')
GPU0, GPU1 = '<gpu dev="0"/>', '<gpu dev="0x1"/>'
CHANNEL = f"<channel>{GPU0}{GPU1}</channel>"


def file_of(graph: str, *channels: str) -> str:
    return f'<graphs version="1">{graph}{"".join(channels)}</graph></graphs>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not XML"),
        ('<system version="1"/>', "begins with <system>"),
        ('<graphs version="2"/>', "version '2'"),
        (file_of(GRAPH), "nchannels is 1, but it has 0"),
        (
            file_of(GRAPH.replace('nchannels="1"', 'nchannels="-1"'), CHANNEL, CHANNEL),
            "nchannels is -1, but it has 2",
        ),
        (
            file_of(GRAPH, '<channel><gpu dev="9"/></channel>'),
            "channel 0 of the ring graph of the file: GPU 0x9 is not in the system",
        ),
        (
            file_of(GRAPH, "<channel><gpu/></channel>"),
            "dev of a <gpu> is '', expected is its device number in hex",
        ),
        (
            file_of(GRAPH, "<channel/>"),
            "it has the GPUs of ranks none; expected is each of the 2 GPUs once",
        ),
        (
            file_of(GRAPH, f"<channel>{GPU0}</channel>"),
            "channel 0 of the ring graph of the file: it has the GPUs of ranks 1; expected",
        ),
        (file_of(GRAPH, f"<channel>{GPU0}{GPU0}</channel>"), "ranks 1 1; expected"),
        (file_of(NVLS, "<channel/>"), "channel 0 of the nvls graph of the file: it names no GPU"),
        ('<graphs version="1"><graph id="0"/></graphs>', "'nchannels' is missing"),
        (file_of(GRAPH.replace("NVL", "FAR"), CHANNEL), "'FAR' is missing or not a path type"),
        (
            file_of(GRAPH.replace('speedintra="1"', 'speedintra="nan"'), CHANNEL),
            "bandwidth 'nan'",
        ),
        (file_of(GRAPH.replace('speedinter="1"', 'speedinter="-1"'), CHANNEL), "bandwidth '-1'"),
        (
            file_of(GRAPH.replace('speedintra="1"', 'speedintra="1e-44"'), CHANNEL),
            "bandwidth '1e-44'; allowed are 0 and 1e-06 to 1e",
        ),
        (
            file_of(GRAPH.replace(">", ' latencyinter="3e38">'), CHANNEL),
            "latency '3e38'; allowed are 0 to 1e",
        ),
        (
            file_of(GRAPH.replace('crossnic="0"', 'crossnic="99"'), CHANNEL),
            "with id '0': crossnic is '99'; allowed are 0 to 2",
        ),
        (
            file_of(GRAPH.replace('samechannels="1"', 'samechannels="-5"'), CHANNEL),
            "samechannels is '-5'; allowed are 0 to 1",
        ),
        (
            file_of(GRAPH.replace('nchannels="1"', 'nchannels="x"'), CHANNEL),
            "nchannels is 'x'; allowed are whole numbers",
        ),
        (
            file_of(GRAPH.replace('pattern="4"', 'pattern="7"'), CHANNEL),
            "pattern is '7'; allowed are 1 to 6",
        ),
        (file_of(GRAPH.replace('id="0"', 'id="7"')), "id is '7'; allowed are 0 to 4"),
        (
            '<!DOCTYPE g [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;">]><graphs '
            'version="1">&b;</graphs>',
            "document type",
        ),
    ],
)
def test_invalid_file_is_rejected_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        graphs_from_xml(text, machine(2, 0))


def test_nets_of_a_channel_are_in_the_system() -> None:
    text = file_of(GRAPH, f'<channel><net dev="0x77"/>{GPU0}{GPU1}<net dev="0"/></channel>')
    with pytest.raises(
        TopologyError,
        match="channel 0 of the ring graph of the file: NET 0x77 is not in the system",
    ):
        graphs_from_xml(text, machine(2, 1))
    assert (
        graphs_from_xml(text, machine(2, 0))[GraphKind.RING].inter == ()
    )  # a node alone needs none
    without = System(nodes=machine(2, 1).gpus, inter=1)  # the search, too, writes 0 there
    assert graphs_from_xml(text.replace("0x77", "0"), without)[GraphKind.RING].inter == ((0, 0),)


def test_a_tree_of_one_gpu_has_one_pattern() -> None:
    tree = GRAPH.replace('id="0" pattern="4"', 'id="1" pattern="{}"')
    text = file_of(tree, f"<channel>{GPU0}</channel>")
    assert graphs_from_xml(text.format(3), machine(1, 0))[GraphKind.TREE].intra == ((0,),)
    for pattern in (1, 2):
        with pytest.raises(
            TopologyError,
            match=f"pattern {pattern} needs two GPUs; a tree on one GPU is pattern 3",
        ):
            graphs_from_xml(text.format(pattern), machine(1, 0))


def test_comments_are_allowed() -> None:
    assert graphs_from_xml('<!-- by hand --><graphs version="1"></graphs>', machine(2, 0)) == {}


def test_invalid_graph_cannot_be_constructed() -> None:
    with pytest.raises(TopologyError, match="65 channels"):
        ChannelGraph(kind=GraphKind.RING, pattern=Pattern.RING, intra=((0,),) * (MAX_CHANNELS + 1))
    with pytest.raises(TopologyError, match="nets for 1 of 2"):
        ChannelGraph(kind=GraphKind.RING, pattern=Pattern.RING, intra=((0,), (0,)), inter=((0, 0),))
    with pytest.raises(TopologyError, match="cannot read the channel graph"):
        graph_from_json({"id": 0})
    with pytest.raises(TopologyError, match="rank 5 is not in the system"):
        graphs_to_xml(
            [ChannelGraph(kind=GraphKind.RING, pattern=Pattern.RING, intra=((5,),))], machine(2, 0)
        )


def test_bandwidths_are_single_precision() -> None:
    data = graph_to_json(
        ChannelGraph(kind=GraphKind.RING, pattern=Pattern.RING, bw_intra=f32(20.6))
    )
    assert struct.pack("f", data["bwIntra"]) == struct.pack("f", 20.6)
    assert data["bwIntra"] == 20.6000004
