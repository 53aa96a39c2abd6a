"""Processes that run code which nobody trusts."""
