"""Profiles: blocks, links and state traffic, measured on this machine."""
