"""Malformed inputs by cause: what a command is given, and what it must say.

A row is a command line and, behind a bar, a part of the one message that it must give.
"""
