"""Attention servers: handshake, rendezvous, server loop, spawning, and the replay of a step."""
