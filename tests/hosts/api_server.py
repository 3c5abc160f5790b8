"""A Kubernetes API server for tests, which the real kubectl speaks to, and what a cluster makes of a Job.

It takes Jobs and Services. It is as strict as a real one with fields, in kubernetes_fields.json: those of Kubernetes 1.36, from the models
of kubernetes-client/python at 024658493 ("!" behind a name: it must be there). Of the rules beside them it knows names, quantities, an
Indexed Job's, and that a Job's pods cannot be changed.
"""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from tests.json_server import JSONHandler, serving

FIELDS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "kubernetes_fields.json").read_text())
_SCALARS = {"str": str, "int": int, "bool": bool, "float": float}
_QUANTITY = r"\d+(\.\d+)?(m|[kMGTPE]i?)?"
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1035; here a Job has its Service's name
_KINDS = {"jobs": ("batch/v1", "Job"), "services": ("v1", "Service")}


def install() -> None:
    """kubectl, by Debian's package, where it is not there."""
    if shutil.which("kubectl"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "kubernetes-client"]):
        subprocess.run(["apt-get", *words], check=True, capture_output=True, env=environment)


@dataclass
class Cluster:
    """What its API server holds: (resource, namespace, name) -> object."""

    port: int = 0
    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)

    def kubeconfig(self, file: Path) -> dict[str, str]:
        """Variables with which kubectl speaks to it."""
        server = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        rest = {"users": [{"name": "u", "user": {}}], "contexts": [context], "current-context": "c"}
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "clusters": [server], **rest}))
        return {"KUBECONFIG": str(file)}

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """What the Job controller makes: a pod for each index, with its name, host name and annotation."""
        spec = self.objects["jobs", namespace, job]["spec"]
        assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
        pods = []
        for index in range(spec["completions"]):
            pod = copy.deepcopy(spec["template"])
            annotations = pod.setdefault("metadata", {}).setdefault("annotations", {})
            annotations["batch.kubernetes.io/job-completion-index"] = str(index)
            pod["spec"]["hostname"] = f"{job}-{index}"
            pods.append(pod)
        return pods

    def names_of(self, namespace: str, pod: dict[str, Any]) -> list[str]:
        """By which other pods of the namespace find it: a headless Service has to be named as its subdomain, and to select it."""
        spec, labels = pod["spec"], pod["metadata"].get("labels", {})
        service = self.objects.get(("services", namespace, spec.get("subdomain", "")))
        if service is None or service["spec"].get("clusterIP") != "None":
            return []
        if not service["spec"]["selector"].items() <= labels.items():
            return []
        return [f"{spec['hostname']}.{spec['subdomain']}"]


def variables_of(pod: dict[str, Any]) -> dict[str, str]:
    """Of its one container, as its kubelet sets them."""
    (container,) = pod["spec"]["containers"]
    variables = {}
    for each in container["env"]:
        if "value" in each:
            variables[each["name"]] = each["value"]
        else:
            path = re.fullmatch(
                r"metadata\.annotations\['(.+)'\]", each["valueFrom"]["fieldRef"]["fieldPath"]
            )
            variables[each["name"]] = pod["metadata"]["annotations"][path[1]]
    return variables


def problems_of(value: Any, kind: str, path: str = "") -> Iterator[str]:
    """What a real server would refuse of a value of this kind."""
    if kind.startswith("list["):
        if not isinstance(value, list):
            yield f"{path}: expected a list"
            return
        for number, item in enumerate(value):
            yield from problems_of(item, kind[5:-1], f"{path}[{number}]")
    elif kind.startswith("dict["):
        if not isinstance(value, dict):
            yield f"{path}: expected an object"
            return
        for name, item in value.items():
            yield from problems_of(item, kind[5:-1].split(",")[1], f"{path}.{name}")
            if path.endswith((".limits", ".requests")) and not re.fullmatch(_QUANTITY, str(item)):
                yield f"{path}.{name}: {item!r} is no quantity"
    elif kind in FIELDS:
        if not isinstance(value, dict):
            yield f"{path}: expected an object"
            return
        fields = {name.rstrip("!"): of for name, of in FIELDS[kind].items()}
        unknown = [f"{path}.{name}".lstrip(".") for name in value if name not in fields]
        yield from (f'unknown field "{name}"' for name in unknown)
        for name in FIELDS[kind]:
            if name.endswith("!") and name[:-1] not in value:
                yield f"{path}.{name[:-1]}: required"
        for name, item in value.items():
            if name in fields:
                yield from problems_of(item, fields[name], f"{path}.{name}")
    elif kind in _SCALARS and type(value) is not _SCALARS[kind]:
        yield f"{path}: expected {kind}, not {value!r}"


def why_not(made: dict[str, Any], resource: str, before: dict[str, Any] | None) -> list[str]:
    """What is wrong with an object, or with its change."""
    problems = [*problems_of(made, f"V1{_KINDS[resource][1]}")]
    if not re.fullmatch(_SERVICE, made.get("metadata", {}).get("name", "")):
        problems.append("metadata.name: a lowercase label that begins with a letter, as a Service's name")
    if resource == "jobs" and not problems:
        spec = made["spec"]
        if spec["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
            problems.append("spec.template.spec.restartPolicy: Never or OnFailure")
        if spec.get("completionMode") == "Indexed" and not spec.get("completions"):
            problems.append("spec.completions: required with Indexed")
        if before is not None and before["spec"]["template"] != spec["template"]:
            problems.append("spec.template: field is immutable")
        for volume in spec["template"]["spec"].get("volumes", []):
            if not re.fullmatch(_LABEL, volume["name"]):
                problems.append(f"volumes: {volume['name']} is no label")
    return problems


@contextmanager
def api_server() -> Iterator[Cluster]:
    cluster = Cluster()

    class Handler(JSONHandler):
        def do_GET(self):
            path = urlparse(self.path).path.strip("/")
            known = _DISCOVERY.get(path)
            place = _place(path)
            if known is not None:
                self.reply(200, known)
            elif place in cluster.objects:
                self.reply(200, cluster.objects[place])
            else:
                self._fail(404, "NotFound", f"{path} not found")

        def do_POST(self):
            resource, namespace, _ = _place(urlparse(self.path).path.strip("/"))
            made = self.body()
            place = resource, namespace, made.get("metadata", {}).get("name", "")
            if place in cluster.objects:
                return self._fail(409, "AlreadyExists", f'{resource} "{place[2]}" already exists')
            self._keep(place, made)

        def do_PATCH(self):
            place = _place(urlparse(self.path).path.strip("/"))
            self._keep(place, _merged(cluster.objects[place], self.body()))

        def do_DELETE(self):
            self.body()
            place = _place(urlparse(self.path).path.strip("/"))
            if cluster.objects.pop(place, None) is None:
                return self._fail(404, "NotFound", f"{place[2]} not found")
            self.reply(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

        def _keep(self, place, made):
            assert parse_qs(urlparse(self.path).query)["fieldValidation"] == ["Strict"]
            before = cluster.objects.get(place)
            if problems := why_not(made, place[0], before):
                return self._fail(422, "Invalid", f"{place[2]} is invalid: {'; '.join(problems)}")
            cluster.objects[place] = made
            self.reply(201 if before is None else 200, made)

        def _fail(self, code: int, reason: str, message: str) -> None:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            self.reply(code, status | {"reason": reason, "message": message, "code": code})

    with serving(Handler) as server:
        cluster.port = server.server_port
        yield cluster


def _place(path: str) -> tuple[str, str, str]:
    """(resource, namespace, name or nothing) of a path of the API."""
    match = re.fullmatch(r"(?:api|apis/batch)/v1/namespaces/([^/]+)/(jobs|services)(?:/([^/]+))?", path)
    return (match[2], match[1], match[3] or "") if match else ("", "", path)


def _merged(old: Any, new: Any) -> Any:
    """RFC 7386, which is what a strategic merge comes to where no list changes."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    return {name: _merged(old.get(name), item) for name, item in {**old, **new}.items() if item is not None}


def _resources(version: str, name: str, kind: str) -> dict[str, Any]:
    resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind}
    verbs = {"verbs": ["create", "delete", "get", "list", "patch", "update"]}
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [resource | verbs],
    }


def _document(group: str, *kinds: str) -> dict[str, Any]:
    """So much of an OpenAPI document that kubectl leaves it to the server to check fields."""
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {}
    for kind in kinds:
        names = {"group": group, "version": "v1", "kind": kind}
        patch = {"x-kubernetes-group-version-kind": names, "parameters": parameters, "responses": {}}
        paths[f"/{kind}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}


_BATCH = {"name": "batch", "versions": [{"groupVersion": "batch/v1", "version": "v1"}]}
_DISCOVERY: dict[str, dict[str, Any]] = {
    # One that the kubectl here knows: Google's is several, of which it takes the server's.
    "version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "api": {"kind": "APIVersions", "versions": ["v1"]},
    "apis": {
        "kind": "APIGroupList", "apiVersion": "v1",
        "groups": [_BATCH | {"preferredVersion": _BATCH["versions"][0]}],
    },
    "api/v1": _resources("v1", "services", "Service"),
    "apis/batch/v1": _resources("batch/v1", "jobs", "Job"),
    "openapi/v3": {
        "paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in ("api/v1", "apis/batch/v1")}
    },
    "openapi/v3/api/v1": _document("", "Service", "Namespace"),  # it asks of a Namespace where it has a List
    "openapi/v3/apis/batch/v1": _document("batch", "Job"),
}  # fmt: skip
