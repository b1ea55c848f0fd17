"""Makes moto's instances and images real: instances are processes with namespaces, and images are their disks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import RLock, Timer
from typing import Any

from tests.provision.aws.bottle.machines import Machine
from tests.provision.aws.region import ACCOUNT, REGION

_RUNNING_SECONDS = 0.5
"""Seconds from the launch to the state "running"; sshd answers later."""
_BY_ITSELF = "Client.InstanceInitiatedShutdown"
_TAKEN_BACK = "Server.SpotInstanceTermination"


class Hosts:
    """The machines of a region, by the ids of their instances.

    Code that changes moto's state must hold `lock`, as requests do.
    """

    def __init__(self, disk: Path, base: str, lock: RLock) -> None:
        self.disk, self.base, self.lock = disk, base, lock
        self.machines: dict[str, Machine] = {}
        self.layers: dict[str, str] = {}
        """Layers of AMIs that were made of instances."""
        self.impostors = False
        """Whether instances that are started from now on have other host keys than user data says."""
        self.broken = ""
        """What fails on instances that are started from now on: BROKEN of boot.sh."""

    def backend(self) -> Any:
        """Return moto's backend of the region."""
        from moto.backends import get_backend

        return get_backend("ec2")[ACCOUNT][REGION]

    def start(self, instance: Any) -> None:
        """Boot a machine for an instance that moto has just made."""
        lower = self.layers.get(instance.image_id, self.base)
        one = Machine(self.disk / instance.id, instance, lower, lambda: self._power_off(instance))
        self.machines[instance.id] = one
        _set_state(instance, "pending", 0)
        one.start(self.impostors, self.broken)
        later = Timer(_RUNNING_SECONDS, lambda: self._say_running(instance))
        later.daemon = True
        later.start()

    def _say_running(self, instance: Any) -> None:
        with self.lock:
            if instance.state == "pending":
                _set_state(instance, "running", 16)

    def _power_off(self, instance: Any) -> None:
        """Handle a shutdown from inside: the launch request said whether that terminates the instance."""
        with self.lock:
            if instance.state in ("pending", "running"):
                ends = instance.instance_initiated_shutdown_behavior == "terminate"
                (instance.terminate if ends else instance.stop)()
                _give_reason(instance, _BY_ITSELF)

    def read_console(self, name: str) -> str:
        """Return the text on the console of an instance."""
        return self.machines[name].console.read_text(encoding="utf-8", errors="replace")

    def interrupt(self, name: str, seconds: float, when: str) -> None:
        """Announce to a spot instance that it is reclaimed at `when`, and reclaim it after `seconds`."""
        self.machines[name].notice = {"action": "terminate", "time": when}
        later = Timer(seconds, lambda: self._take_back(name))
        later.daemon = True
        later.start()

    def _take_back(self, name: str) -> None:
        with self.lock:
            instance = self.backend().get_instance(name)
            if instance.state == "running":
                instance.terminate()
                _give_reason(instance, _TAKEN_BACK)

    def find(self, address: str) -> tuple[Any, Mapping[str, str]] | None:
        """Return the instance that has an address now, and its interruption notice."""
        with self.lock:
            for one in self.backend().all_instances():
                if one.private_ip == address and one.state in ("pending", "running"):
                    return one, self.machines[one.id].notice
        return None


def _set_state(instance: Any, name: str, code: int) -> None:
    instance._state.name, instance._state.code = name, code


def _give_reason(instance: Any, code: str) -> None:
    instance._reason = ""
    instance.state_reason.code, instance.state_reason.message = code, code


def host(hosts: Hosts) -> None:
    """Let moto start and end machines, as long as this process runs."""
    from moto.ec2.models.amis import AmiBackend
    from moto.ec2.models.instances import Instance, InstanceBackend
    from moto.ec2.models.security_groups import SecurityGroupBackend

    InstanceBackend.run_instances = _make_run(hosts, InstanceBackend.run_instances)
    for name in ("terminate", "stop", "start", "reboot"):
        setattr(Instance, name, _make_power(hosts, getattr(Instance, name), name))
    AmiBackend.create_image = _make_image(hosts, AmiBackend.create_image)
    SecurityGroupBackend.delete_security_group = _make_delete(SecurityGroupBackend.delete_security_group)


def _make_run(hosts: Hosts, real: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *words: Any, **options: Any) -> Any:
        reservation = real(self, *words, **options)
        for one in reservation.instances:
            hosts.start(one)
        return reservation

    return run


def _make_power(hosts: Hosts, real: Callable[[Any], Any], verb: str) -> Callable[[Any], Any]:
    def power(self: Any) -> Any:
        one = hosts.machines[self.id]
        if verb != "start":
            one.end()
        before = real(self)
        if verb in ("start", "reboot"):
            one.start()
        return before

    return power


def _make_image(hosts: Hosts, real: Callable[..., Any]) -> Callable[..., Any]:
    def create(self: Any, instance_id: str, name: str, description: str, tag_specifications: Any) -> Any:
        from moto.ec2.exceptions import EC2ClientError

        if any(one.name == name for one in self.amis.values()):
            raise EC2ClientError("InvalidAMIName.Duplicate", f"AMI name {name} is already in use")
        image = real(self, instance_id, name, description, [])
        for one in tag_specifications:
            made = image if one["ResourceType"] == "image" else image.ebs_snapshot
            made.add_tags({tag["Key"]: tag["Value"] for tag in one["Tags"]})
        instance = self.get_instance(instance_id)
        image.root_device_name = instance.root_device_name
        hosts.layers[image.id] = hosts.machines[instance_id].freeze()
        return image

    return create


def _make_delete(real: Callable[..., Any]) -> Callable[..., Any]:
    def delete(self: Any, name: str | None = None, group_id: str | None = None) -> Any:
        from moto.ec2.exceptions import DependencyViolationError

        users = [one for one in self.all_instances() if one.state != "terminated"]
        if any(group.id == group_id for one in users for nic in one.nics.values() for group in nic.group_set):
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
        return real(self, name, group_id)

    return delete
