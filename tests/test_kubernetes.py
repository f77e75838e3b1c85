"""The job for Kubernetes has the fields that the training operator documents, and calls what is in the repository.

The schema is our own short form of the operator's v1 API; it names every field that the manifest may use.
"""

import shlex
from pathlib import Path

import pytest
import yaml

from wbmm.train.config import load_config

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "scripts" / "train_kubernetes.yaml"


def fields(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(**each):
    return {"type": "array", "minItems": 1, "items": each or {"type": "string"}}


TEXT, FLAG, COUNT = {"type": "string", "minLength": 1}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
QUANTITY = {"anyOf": [COUNT, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}]}
MOUNT = fields(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly=FLAG)
CONTAINER = fields(
    ("name", "image"),
    name={"const": "pytorch"},  # by which the operator finds it
    image=TEXT,
    workingDir=TEXT,
    command=many(),
    args=many(),
    resources=fields(limits={"type": "object", "additionalProperties": QUANTITY}),
    volumeMounts=many(**MOUNT),
)
VOLUME = fields(
    ("name",),
    name=TEXT,
    persistentVolumeClaim=fields(("claimName",), claimName=TEXT, readOnly=FLAG),
    emptyDir=fields(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = fields(("containers",), terminationGracePeriodSeconds=COUNT, containers=many(**CONTAINER), volumes=many(**VOLUME))
REPLICA = fields(
    ("replicas", "template"),
    replicas={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=fields(("spec",), spec=POD),
)
JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=fields(("name",), name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, namespace=TEXT),
    spec=fields(
        ("pytorchReplicaSpecs",),
        runPolicy=fields(cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=COUNT),
        pytorchReplicaSpecs=fields(("Master",), Master=REPLICA, Worker=REPLICA),
    ),
)


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def replicas(job):
    return job["spec"]["pytorchReplicaSpecs"]


def test_it_fits_the_schema(job):
    jsonschema.validate(job, JOB)


@pytest.mark.parametrize(
    ("place", "value"),
    [(("kind",), "Job"), (("spec", "runPolicy", "cleanPods"), "All"), (("spec", "pytorchReplicaSpecs", "Worker"), {})],
)
def test_the_schema_refuses_what_the_operator_would(job, place, value):
    job = yaml.safe_load(yaml.safe_dump(job))
    *path, last = place
    part = job
    for key in path:
        part = part[key]
    part[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, JOB)


def test_the_command_calls_what_is_there(replicas):
    words = shlex.split(replicas["Master"]["template"]["spec"]["containers"][0]["args"][0])
    script, config, *values = words[words.index("exec") + 1 :]
    assert (ROOT / script).is_file()
    load_config(ROOT / config, values)  # every key exists, every value is valid
    assert f"NODES={sum(replica['replicas'] for replica in replicas.values())}" in words
    assert "resume=auto" in values


def test_every_mount_has_its_volume(replicas):
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
