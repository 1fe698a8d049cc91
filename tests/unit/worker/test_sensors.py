"""Readings of the whole machine, from recorded outputs of the programs that print them."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Callable, Iterator

import psutil
import pytest

from coordinator.server.live_status import machine_fields
from proto import cluster_pb2 as pb
from worker.engine import sensors

PORTABLE_MAC = """\
+-o AppleSmartBattery  <class AppleSmartBattery, id 0x100000300, registered, matched, active>
    {
      "PowerTelemetryData" = {"WallEnergyEstimate"=0,"SystemPowerIn"=13120,"SystemLoad"=11842,"BatteryPower"=0}
      "Temperature" = 3069
    }
"""


def recorded(text: str) -> Callable[..., str]:
    """Return a `command_output` that prints `text`."""
    return lambda *command: text


def test_a_portable_mac_reports_its_power() -> None:
    """ioreg prints milliwatts of the whole machine. The temperature there is the battery's, so it is not used."""
    assert sensors.read_darwin(recorded(PORTABLE_MAC)) == (None, 11.842)


def test_a_desktop_mac_reports_nothing() -> None:
    """Without a battery there is no source that works without root."""
    assert sensors.read_darwin(recorded("")) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("41, 118.52\n", (41, 118.52)), ("41, [N/A]\n", (41, None)), ("", (None, None))],
)
def test_nvidia_smi_reports_degrees_and_watts(text: str, expected: sensors.Readings) -> None:
    """A missing program and a value that the driver does not offer are unknown."""
    assert sensors.read_nvidia(recorded(text)) == expected


def test_impossible_readings_are_unknown() -> None:
    """A broken sensor reports -273 or 255 degrees."""
    for degrees in (-273.0, 255.0):
        assert not sensors.machine_state(degrees, None).HasField("temperature")
    assert not sensors.machine_state(None, 0.0).HasField("power")


def test_the_state_has_memory_and_swap_everywhere() -> None:
    """Free memory and swap are of the whole machine."""
    state = sensors.read_machine()
    assert 0 < state.memory_free <= psutil.virtual_memory().total
    assert state.swap_used <= psutil.swap_memory().total


def test_a_hostile_report_cannot_break_the_status() -> None:
    """JSON has no NaN, so a number that is not finite becomes unknown. A worker without the message reports nothing."""
    state = pb.MachineState(memory_free=5, temperature=math.nan, power=math.inf)
    assert machine_fields(state) == {
        "memory_free": 5,
        "swap_used": 0,
        "temperature": None,
        "power": None,
    }
    assert machine_fields(pb.MachineState()) == {}


def test_a_reading_without_descriptors_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a free descriptor keeps its last reading, its version, and reads its sensors later."""
    found: Iterator[OSError | pb.MachineState] = iter(
        [OSError(errno.EMFILE, "Too many open files"), pb.MachineState(swap_used=7)]
    )

    def read() -> pb.MachineState:
        """Fail once."""
        if isinstance(reading := next(found), OSError):
            raise reading
        return reading

    async def refresh_twice() -> int:
        """Refresh until both readings are used."""
        node = sensors.Sensors()
        task = asyncio.create_task(node.refresh())
        while node.latest.swap_used != 7:
            await asyncio.sleep(0.001)
            assert not task.done()
        task.cancel()
        return node.latest.swap_used

    monkeypatch.setattr(sensors, "read_machine", read)
    monkeypatch.setattr(sensors, "REFRESH_SECONDS", 0.001)
    assert asyncio.run(asyncio.wait_for(refresh_twice(), 10)) == 7
    assert sensors.own_version()
    monkeypatch.setattr(sensors, "version", None)
    assert sensors.own_version()


def test_a_missing_program_prints_nothing() -> None:
    """Machines without the program have no reading, and no error."""
    assert sensors.command_output("/nonexistent/program") == ""
