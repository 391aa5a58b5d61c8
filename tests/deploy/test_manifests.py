"""The Kubernetes manifests: references resolve, and the server's command and configuration are valid."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.deployment_files import (
    CACHE_DIR,
    CONFIG,
    DATA_DIR,
    DEPLOY,
    PORT,
    USER,
    check_command,
    configuration,
    documents,
    paths_of_routes,
)
from twinkle.server.config import ModelArgs

FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
API = {
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "RayCluster": "ray.io/v1",
}
# The keys that our pod specifications use. An unknown key is a typing error.
POD = {
    "automountServiceAccountToken",
    "containers",
    "securityContext",
    "terminationGracePeriodSeconds",
    "volumes",
}
CONTAINER = {
    "args",
    "command",
    "env",
    "image",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
    "volumeMounts",
}
PROBE = {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold", "initialDelaySeconds"}
RAYLET = ("/api/local_raylet_healthz", 52365)  # answered by Ray, not by the server


def by_kind(file: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in documents(file) if one["kind"] == kind]


def templates(file: Path) -> Iterator[dict[str, Any]]:
    """Yield all pod templates."""
    for deployment in by_kind(file, "Deployment"):
        yield deployment["spec"]["template"]
    for cluster in by_kind(file, "RayCluster"):
        yield cluster["spec"]["headGroupSpec"]["template"]
        yield from (group["template"] for group in cluster["spec"]["workerGroupSpecs"])


def containers(file: Path) -> Iterator[dict[str, Any]]:
    for template in templates(file):
        yield from template["spec"]["containers"]


def test_there_are_two() -> None:
    assert [file.name for file in FILES] == ["deployment.yaml", "raycluster.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_documents_are_of_known_kinds(file: Path) -> None:
    found = documents(file)
    for one in found:
        assert {"apiVersion", "kind", "metadata"} <= one.keys() <= {"apiVersion", "kind", "metadata", "spec", "data"}
        assert API[one["kind"]] == one["apiVersion"]
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_servers_configuration_is_good(file: Path, tmp_path: Path) -> None:
    (config_map,) = by_kind(file, "ConfigMap")
    config, _ = configuration(config_map["data"]["server.yaml"], tmp_path)
    assert (config.http_options.host, config.http_options.port) == ("0.0.0.0", PORT)
    assert config.auth.mode == "keys"
    assert str(config.data_dir) == DATA_DIR
    is_cluster = bool(by_kind(file, "RayCluster"))
    assert config.runtime == ("ray" if is_cluster else "embedded")
    assert (config.persistence.url is not None) == is_cluster, "SQLite does not work over a network"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_pods_have_known_keys_and_few_rights(file: Path) -> None:
    for template in templates(file):
        pod = template["spec"]
        assert pod.keys() <= POD
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
        assert pod["terminationGracePeriodSeconds"] >= 60, "a server drains"
    for container in containers(file):
        assert container.keys() <= CONTAINER
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_volumes_exist(file: Path) -> None:
    maps = {one["metadata"]["name"] for one in by_kind(file, "ConfigMap")}
    claims = {one["metadata"]["name"] for one in by_kind(file, "PersistentVolumeClaim")}
    for template in templates(file):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes.keys()
            assert volumes[mounts[DATA_DIR]]["persistentVolumeClaim"]["claimName"] in claims
            assert volumes[mounts[str(Path(CONFIG).parent)]]["configMap"]["name"] in maps
            if container["securityContext"].get("readOnlyRootFilesystem"):
                assert {CACHE_DIR, "/tmp"} <= mounts.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_probes_ask_what_exists(file: Path) -> None:
    routes = paths_of_routes()
    for container in containers(file):
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert len(probes) >= 2
        for probe in probes:
            assert probe.keys() <= PROBE
            asked = probe["httpGet"]["path"], ports.get(probe["httpGet"]["port"], probe["httpGet"]["port"])
            assert asked == RAYLET or (asked[0] in routes and asked[1] == PORT)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_services_find_the_server(file: Path) -> None:
    (service,) = by_kind(file, "Service")
    (port,) = service["spec"]["ports"]
    chosen = [
        template
        for template in templates(file)
        if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ]
    assert len(chosen) == 1
    (container,) = chosen[0]["spec"]["containers"]
    assert {port["targetPort"]: port["port"]}.items() <= {
        one["name"]: one["containerPort"] for one in container["ports"]
    }.items()


def test_one_server_owns_the_data() -> None:
    (deployment,) = by_kind(DEPLOY / "kubernetes" / "deployment.yaml", "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    check_command(["twinkle-server", *container["args"]])  # the image's entry point


def test_the_cluster_has_the_devices_that_the_server_wants(tmp_path: Path) -> None:
    file = DEPLOY / "kubernetes" / "raycluster.yaml"
    (cluster,) = by_kind(file, "RayCluster")
    config, _ = configuration(by_kind(file, "ConfigMap")[0]["data"]["server.yaml"], tmp_path)
    (model,) = [one for one in config.applications if isinstance(one.args, ModelArgs)]
    replicas = model.deployments[0].num_replicas
    assert replicas is not None
    assert model.args.compute_device == "cuda"
    wanted = replicas * model.args.processes
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == wanted > 0
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_head_becomes_the_server() -> None:
    (cluster,) = by_kind(DEPLOY / "kubernetes" / "raycluster.yaml", "RayCluster")
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    *_, ray, wait, launch = head["args"][0].strip().splitlines()
    assert ray.startswith("$KUBERAY_GEN_RAY_START_CMD")
    assert "ray health-check" in wait
    assert launch.startswith("exec ")
    check_command(launch.split()[1:])
