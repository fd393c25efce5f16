"""Tests of the datagram machines, in virtual time."""
