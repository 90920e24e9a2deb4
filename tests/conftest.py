"""Tests compute as the workers do: the exact environment, set before anything imports torch."""

import onbeat

onbeat.prepare_environment()
