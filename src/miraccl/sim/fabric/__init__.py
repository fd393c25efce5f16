"""Packet-level fabric in virtual time: switches with queues, ECN, trimming, ECMP, failing links.

``topology`` describes a network, ``network`` runs it. Its hosts are either datagram flows
(``datagram_host``: the machines of ``wire.datagram`` without change) or the transfers of
``transfers``, which ``compiled`` runs on fabrics of a thousand hosts.
"""
