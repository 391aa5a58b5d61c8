"""The Kubernetes manifests: valid for Kubernetes, all references resolve, and the server understands its part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
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
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ModelArgs
from twinkle.server.runtime.ray.proxy_answers import PROXY_CALLBACK, PROXY_VARIABLE

FOLDER = DEPLOY / "kubernetes"
MONITOR = FOLDER / "servicemonitor.yaml"
FILES = [FOLDER / "deployment.yaml", FOLDER / "raycluster.yaml"]
VERSIONS = ("1.30", "1.37")  # of Kubernetes: an old one, and the newest that kubernetes-validate knows
LIVE, READY = "/api/v1/healthz", "/api/v1/healthz/ready"
API = {
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "RayCluster": "ray.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}
KNOWN_TO_KUBERNETES = [kind for kind in API if kind not in ("RayCluster", "ServiceMonitor")]
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


def mounted(template: dict[str, Any], container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the volume at each path of a container."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


def as_pod(template: dict[str, Any], name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name, **template["metadata"]}}


def test_every_manifest_is_tested() -> None:
    assert sorted(FOLDER.glob("*.yaml")) == sorted([*FILES, MONITOR])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_knows_every_field(file: Path, version: str) -> None:
    for one in documents(file):
        if one["kind"] in KNOWN_TO_KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)
    for number, template in enumerate(templates(file)):  # also those inside of kinds that Kubernetes does not know
        kubernetes_validate.validate(as_pod(template, f"pod-{number}"), version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    (template, *_) = templates(FILES[1])
    template["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(as_pod(template, "pod"), VERSIONS[-1], strict=True)


@pytest.mark.parametrize("file", [*FILES, MONITOR], ids=lambda file: file.name)
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
    assert cli.main(["check-config", str(tmp_path / "server.yaml")]) == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_pods_have_few_rights(file: Path) -> None:
    for template in templates(file):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
        assert pod["terminationGracePeriodSeconds"] >= 60, "a server drains"
    for container in containers(file):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_volumes_exist(file: Path) -> None:
    maps = {one["metadata"]["name"] for one in by_kind(file, "ConfigMap")}
    claims = {one["metadata"]["name"] for one in by_kind(file, "PersistentVolumeClaim")}
    for template in templates(file):
        for container in template["spec"]["containers"]:
            at = mounted(template, container)
            assert at[DATA_DIR]["persistentVolumeClaim"]["claimName"] in claims
            assert at[CACHE_DIR]["persistentVolumeClaim"]["claimName"] in claims - {at[DATA_DIR]["name"]}
            assert at[str(Path(CONFIG).parent)]["configMap"]["name"] in maps
            assert at["/dev/shm"]["emptyDir"]["medium"] == "Memory", "torch and Ray share memory between processes"
            if container["securityContext"].get("readOnlyRootFilesystem"):
                assert "/tmp" in at


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_secret_is_written_down(file: Path, tmp_path: Path) -> None:
    """Passwords and tokens come from secrets, which the files only name."""
    assert not by_kind(file, "Secret")
    for container in containers(file):
        for variable in container.get("env", []):
            if any(word in variable["name"].upper() for word in ("PASSWORD", "TOKEN", "SECRET", "KEY")):
                assert variable["valueFrom"].keys() == {"secretKeyRef"}
    config, _ = configuration(by_kind(file, "ConfigMap")[0]["data"]["server.yaml"], tmp_path)
    assert config.persistence.url is None or urlsplit(config.persistence.url).password is None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_prometheus_can_read_the_metrics(file: Path, tmp_path: Path) -> None:
    """From another machine, with the token of a secret that the pods mount and the ServiceMonitor names."""
    (config_map,) = by_kind(file, "ConfigMap")
    config, _ = configuration(config_map["data"]["server.yaml"], tmp_path)
    (monitor,) = by_kind(MONITOR, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    secret = endpoint["authorization"]["credentials"]
    token = config.telemetry.metrics_token_file
    assert token is not None
    for template in templates(file):
        for container in template["spec"]["containers"]:  # on Ray each process reads the token
            source = mounted(template, container)[str(token.parent)]["secret"]
            assert (source["secretName"], token.name) == (secret["name"], secret["key"])
            # Kubernetes gives the files to root and to the group fsGroup, in which our process is
            assert source["defaultMode"] & 0o777 == 0o440
    assert endpoint["path"] in paths_of_routes()
    (service,) = by_kind(file, "Service")
    (rule,) = monitor["spec"]["selector"]["matchExpressions"]
    assert service["metadata"]["labels"][rule["key"]] in rule["values"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_probes_ask_what_exists(file: Path) -> None:
    routes = paths_of_routes()
    for container in containers(file):
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        asked = {
            kind: (probe["path"], ports.get(probe["port"], probe["port"]))
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if (probe := container.get(kind, {}).get("httpGet"))
        }
        if not ports:  # a Ray worker, which only the head calls
            assert asked == {"readinessProbe": RAYLET, "livenessProbe": RAYLET}
            continue
        assert asked == {"startupProbe": (LIVE, PORT), "readinessProbe": (READY, PORT), "livenessProbe": (LIVE, PORT)}
        assert {LIVE, READY} <= routes


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
    (deployment,) = by_kind(FOLDER / "deployment.yaml", "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    check_command(["twinkle-server", *container["args"]])  # the image's entry point


def test_the_cluster_has_the_devices_that_the_server_wants(tmp_path: Path) -> None:
    file = FOLDER / "raycluster.yaml"
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


def test_proxies_answer_503_while_applications_start_or_stop() -> None:
    """Without the callback Serve's proxies answer 404, at which clients give up."""
    for container in containers(FOLDER / "raycluster.yaml"):
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables[PROXY_VARIABLE] == PROXY_CALLBACK


def test_the_head_becomes_the_server() -> None:
    (cluster,) = by_kind(FOLDER / "raycluster.yaml", "RayCluster")
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    *_, ray, wait, launch = head["args"][0].strip().splitlines()
    assert ray.startswith("$KUBERAY_GEN_RAY_START_CMD")
    assert "ray health-check" in wait
    assert launch.startswith("exec ")
    check_command(launch.split()[1:])
