"""Tests compute as the workers do: the exact environment, set before anything imports torch."""

import signal

from hypothesis import HealthCheck, Phase, settings

import onbeat

onbeat.prepare_environment()

# A shell starts what it runs in the background deaf to Ctrl-C, and onbeat respects that: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Time never decides a test. An example is a model run: a failing one is shown as found, not shrunk for minutes.
settings.register_profile(
    "onbeat",
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("onbeat")
