"""The process of the simulated region: an AWS endpoint in front of moto, and a socket for requests of tests.

    python -m tests.provision.aws.bottle.server FOLDER [hosts]

It prints its address and ends with its standard input, so it ends when the process that started it dies.
With `hosts` its instances are real. It then needs its own network, mount and process namespaces, which end with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Listener
from pathlib import Path
from threading import RLock, Thread
from typing import Any
from urllib.parse import parse_qsl

from cpuft.provision.aws.client import Tag
from tests.provision.aws.bottle.hosting import Hosts, host
from tests.provision.aws.bottle.machines import make_base, wire
from tests.provision.aws.bottle.metadata import Service
from tests.provision.aws.region import ACCOUNT, NAME, REGION, Region, client, left, open_region

LOCK = RLock()
"""Lock of moto's state."""


class Endpoint(ThreadingHTTPServer):
    """The AWS endpoint. Connections are not kept alive, so that a killed client leaves no half request behind."""

    daemon_threads = True

    def __init__(self) -> None:
        from moto.core.botocore_stubber import BotocoreStubber

        super().__init__(("127.0.0.1", 0), _Handler)
        self.stubber = BotocoreStubber()
        self.calls: list[str] = []
        """Names of the calls that changed something, or would have."""

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and text of moto's response to a signed request."""
        from botocore.awsrequest import AWSPreparedRequest

        _, _, region, service, *_ = headers["Authorization"].split("/")
        place = f"{service}.{region}.amazonaws.com"
        asked = dict(parse_qsl(body.decode(errors="replace")))
        with LOCK:
            if not asked.get("Action", "Describe").startswith(("Describe", "Get")) and "DryRun" not in asked:
                self.calls.append(asked["Action"])
            request = AWSPreparedRequest("POST", f"https://{place}{path}", headers | {"Host": place}, body, False)
            return self.stubber.process_request(request) or (404, {}, "")


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        status, headers, text = self.server.answer(self.path, dict(self.headers.items()), body)
        said = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, str(value))
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; calls are counted instead."""


class Desk:
    """Requests of tests: the name of a method and its arguments."""

    def __init__(self, region: Region, endpoint: Endpoint, hosts: Hosts | None) -> None:
        self._region, self._endpoint, self._hosts = region, endpoint, hosts
        self._first = self._list_images()

    def _list_images(self) -> tuple[set[str], set[str]]:
        ec2 = client()
        images = {one["ImageId"] for one in ec2.describe_images(Owners=["self"])["Images"]}
        return images, {one["SnapshotId"] for one in ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]}

    def left(self) -> dict[str, Any]:
        """Return all resources that did not exist at first."""
        images, snapshots = (now - first for now, first in zip(self._list_images(), self._first))
        return left(self._region) | {"images": sorted(images), "snapshots": sorted(snapshots)}

    def calls(self) -> list[str]:
        """Return the names of changing calls since the last request for them."""
        told, self._endpoint.calls = self._endpoint.calls, []
        return told

    def change(self, name: str, value: Any) -> None:
        """Set a field of the region, such as its faults."""
        setattr(self._region, name, value)

    def instances(self) -> list[dict[str, Any]]:
        """Return all instances in the order of their launch, including terminated ones."""
        found = client().describe_instances()["Reservations"]
        return [
            {
                "id": one["InstanceId"],
                "state": one["State"]["Name"],
                "reason": one.get("StateReason", {}).get("Code", ""),
                "image": one["ImageId"],
                "private": one.get("PrivateIpAddress", ""),
                "public": one.get("PublicIpAddress", ""),
            }
            for place in found
            for one in place["Instances"]
        ]

    def terminate(self, name: str) -> None:
        """Terminate an instance, as another user would."""
        client().terminate_instances(InstanceIds=[name])

    def litter(self) -> None:
        """Add an unattached disk of the cluster, and a rule of its group that allows everybody."""
        ec2, tags = client(), [{"Key": Tag.CLUSTER, "Value": NAME}]
        zone, specifications = f"{REGION}a", [{"ResourceType": "volume", "Tags": tags}]
        ec2.create_volume(AvailabilityZone=zone, Size=8, TagSpecifications=specifications)
        (group,) = ec2.describe_security_groups(Filters=[{"Name": f"tag:{Tag.CLUSTER}", "Values": [NAME]}])[
            "SecurityGroups"
        ]
        world = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[world])

    def forget(self) -> None:
        """Stop listing terminated instances, as AWS does after an hour."""
        from moto.backends import get_backend

        reservations = get_backend("ec2")[ACCOUNT][REGION].reservations
        for name in [name for name, one in reservations.items() if {i.state for i in one.instances} == {"terminated"}]:
            del reservations[name]

    def console(self, name: str) -> str:
        """Return the text on an instance's console."""
        assert self._hosts
        return self._hosts.read_console(name)

    def interrupt(self, name: str, seconds: float) -> None:
        """Announce to a spot instance that it will be reclaimed after some seconds."""
        assert self._hosts
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        self._hosts.interrupt(name, seconds, when)

    def send_impostors(self, really: bool) -> None:
        """Choose whether other machines answer at the addresses of instances that are started from now on."""
        assert self._hosts
        self._hosts.impostors = really

    def send_broken(self, what: str) -> None:
        """What fails on instances that are started from now on: BROKEN of boot.sh."""
        assert self._hosts
        self._hosts.broken = what


def serve_desk(listener: Listener, desk: Desk) -> None:
    """Answer requests of tests, one after another."""
    while True:
        with suppress(EOFError, OSError), listener.accept() as connection:
            name, *words = connection.recv()
            try:
                with LOCK:
                    answer = getattr(desk, name)(*words)
            except Exception as error:  # the test that asked is told, and the region goes on
                answer = error
            connection.send(answer)


def make_hosts(folder: Path) -> Hosts:
    """Prepare for real instances. Their disks are in memory and visible in this namespace only."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60%", "tmpfs", str(disk)], check=True)
    wire()
    hosts = Hosts(disk, make_base(disk / "debian"), LOCK)
    host(hosts)
    return hosts


def main(folder: Path, hosts: Hosts | None) -> None:
    """Run until standard input ends."""
    with open_region() as region, Listener(str(folder / "desk"), "AF_UNIX") as listener:
        if hosts:
            region.read_console = hosts.read_console
        endpoint = Endpoint()
        desk = Desk(region, endpoint, hosts)
        threads = [Thread(target=endpoint.serve_forever), Thread(target=serve_desk, args=(listener, desk))]
        threads += [Thread(target=Service(hosts.find).serve_forever)] if hosts else []
        for one in threads:
            one.daemon = True
            one.start()
        print(f"http://127.0.0.1:{endpoint.server_port}", flush=True)
        sys.stdin.buffer.read()
        os._exit(0)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    main(place, make_hosts(place) if sys.argv[2:] == ["hosts"] else None)
