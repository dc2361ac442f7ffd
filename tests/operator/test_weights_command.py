"""`tidegate weights` against doubles of an object store and of the hub."""

import datetime
import errno
import fcntl
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading

import huggingface_hub
import pytest

from tidegate_operator.weights import bucket_origin, origin, weight_cache, weight_report, weight_source, weights_command

from . import object_store

Reason = weight_report.Reason
FILES = {"config.json": b"{}", "model-1.safetensors": b"a" * 5000, "model-2.safetensors": b"b" * 7000}
SUMS = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in FILES.items())
BUCKET = {f"models/qwen/{name}": content for name, content in {**FILES, "SHA256SUMS": SUMS.encode()}.items()}
URI = "s3://models/qwen"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("AWS_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_store.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))


@pytest.fixture
def bucket():
    with object_store.running(object_store.S3, dict(BUCKET)) as server:
        yield server


@pytest.fixture
def hub():
    with object_store.running(object_store.Hub, dict(FILES)) as server:
        yield server


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def download(server, cache, uri=URI, say=lambda line: None):
    return weights_command.download(weight_source.parse(uri), cache, endpoint=server.url, say=say)


def failure(server, cache, uri=URI):
    with pytest.raises(weight_report.WeightsError) as caught:
        download(server, cache, uri)
    return caught.value


def contents(folder):
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    }


@pytest.mark.parametrize(
    ("kind", "uri"),
    [("bucket", URI), ("bucket", "s3://models/qwen/"), ("hub", "hf://owner/model"), ("hub", "hf://owner/model@main")],
)
def test_a_model_is_downloaded_whole_and_a_second_engine_asks_nothing(request, cache, kind, uri):
    server = request.getfixturevalue(kind)
    folder = download(server, cache, uri)
    assert contents(folder) == FILES
    asked = len(server.asked)
    assert download(server, cache, uri) == folder
    assert len(server.asked) == asked


def test_two_engines_that_start_at_the_same_time_download_once(bucket, cache):
    bucket.gate.clear()
    found, lines = [], []
    waits = threading.Event()

    def say(line):
        lines.append(line)
        if line.startswith("waits for another pod"):
            waits.set()

    engines = [threading.Thread(target=lambda: found.append(download(bucket, cache, say=say))) for _ in range(2)]
    for engine in engines:
        engine.start()
    assert waits.wait(timeout=30)
    bucket.gate.set()
    for engine in engines:
        engine.join(timeout=30)
    assert [contents(folder) for folder in found] == [FILES, FILES]
    assert len(bucket.fetched()) == len(set(bucket.fetched()))


def test_a_download_that_was_stopped_goes_on_with_the_files_that_it_had(bucket, cache):
    bucket.damaged["models/qwen/model-2.safetensors"] = b"x" * 7000
    assert failure(bucket, cache).reason is Reason.DIFFER
    bucket.damaged.clear()
    before = len(bucket.fetched())
    assert contents(download(bucket, cache)) == FILES
    assert bucket.fetched()[before:] == ["/models/qwen/SHA256SUMS", "/models/qwen/model-2.safetensors"]


@pytest.mark.parametrize(("kind", "uri"), [("bucket", URI), ("hub", "hf://owner/model")])
def test_a_download_that_goes_on_leaves_out_files_that_the_source_has_no_more(request, cache, kind, uri):
    server = request.getfixturevalue(kind)
    folder = "models/qwen/" if kind == "bucket" else ""
    server.damaged[f"{folder}model-2.safetensors"] = b"x" * 7000
    assert failure(server, cache, uri).reason is Reason.DIFFER
    (partial,) = cache.glob("*.partial")
    for name in ("lora/old.safetensors", "old.safetensors", f"{weight_cache.NOTES}/hash.etag{weight_cache.UNFINISHED}"):
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(b"o" * 10_000)
    new = {"config.json": b"{}", "model.safetensors": b"c" * 9000}
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in new.items())
    served = {**new, "SHA256SUMS": sums.encode()} if kind == "bucket" else new
    server.contents.clear()
    server.contents |= {f"{folder}{name}": content for name, content in served.items()}
    said = []
    found = download(server, cache, uri, said.append)
    kept = {path.relative_to(found).as_posix() for path in found.rglob("*")}
    assert {path for path in kept if not path.startswith(weight_cache.NOTES)} == {*new, weight_cache.MANIFEST}
    assert not any(path.endswith(weight_cache.UNFINISHED) for path in kept)
    assert int(said[0].partition("%")[0]) < 10, "the old files count as no progress"


@pytest.mark.parametrize(("kind", "uri"), [("bucket", URI), ("hub", "hf://owner/model")])
@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors"])
def test_a_file_whose_checksum_differs_never_reaches_an_engine(request, cache, kind, uri, name):
    server = request.getfixturevalue(kind)
    path = f"models/qwen/{name}" if kind == "bucket" else name
    server.damaged[path] = b"y" * len(FILES[name])
    error = failure(server, cache, uri)
    assert error.reason is Reason.DIFFER
    assert str(error).startswith(f"WeightsDiffer: {name} has the ")
    assert "upload the file again" in str(error)
    assert not weight_cache.Copy(cache, weight_source.parse(uri).folder(server.url)).folder.exists()
    server.damaged.clear()
    assert contents(download(server, cache, uri)) == FILES


def test_without_checksums_a_file_of_another_size_never_reaches_an_engine(bucket, cache):
    del bucket.contents["models/qwen/SHA256SUMS"]
    bucket.damaged["models/qwen/model-1.safetensors"] = b"short"
    assert "has 5 bytes, and its source states 5000" in str(failure(bucket, cache))
    bucket.damaged.clear()
    lines = []
    download(bucket, cache, say=lines.append)
    assert any("no checksums" in line for line in lines)


def test_a_bucket_without_a_file_that_its_checksums_name_is_not_whole(bucket, cache):
    del bucket.contents["models/qwen/model-2.safetensors"]
    error = failure(bucket, cache)
    assert error.reason is Reason.DIFFER
    assert "s3://models/qwen has no model-2.safetensors, which its SHA256SUMS names: upload it first" in str(error)
    assert not any("safetensors" in path for path in bucket.fetched())


def test_checksums_may_name_a_format_that_no_engine_needs(bucket, cache):
    bucket.contents["models/qwen/SHA256SUMS"] += f"{'0' * 64}  pytorch_model.bin\n".encode()
    assert contents(download(bucket, cache)) == FILES


@pytest.mark.parametrize(
    "line", [b"abc", b"0" * 64, b"0" * 32 + b"  config.json", b"SHA256 (config.json) = " + b"0" * 64, b"\xff\xfe0\0"]
)
def test_a_line_of_the_checksums_that_cannot_be_read_is_named(bucket, cache, line):
    bucket.contents["models/qwen/SHA256SUMS"] += line + b"\n"
    error = failure(bucket, cache)
    assert error.reason is Reason.DIFFER
    assert "line 4 of SHA256SUMS in s3://models/qwen is no checksum" in str(error)


@pytest.mark.parametrize("form", ["{} *{}\n", "{}  ./{}\n", "{}  {}\r\n", "\n{}  {}\n"])
def test_checksums_have_the_forms_that_sha256sum_writes(bucket, cache, form):
    sums = "".join(form.format(hashlib.sha256(content).hexdigest(), name) for name, content in FILES.items())
    bucket.contents["models/qwen/SHA256SUMS"] = sums.encode()
    lines = []
    assert contents(download(bucket, cache, say=lines.append)) == FILES
    assert not any("no checksums" in line for line in lines)


@pytest.mark.parametrize("sums", [True, False])
def test_markers_of_folders_are_no_files(bucket, cache, sums):
    if not sums:
        del bucket.contents["models/qwen/SHA256SUMS"]
    markers = {f"models/qwen/{name}": b"" for name in ("", "sub/", "sub/deep/", "none/")}
    bucket.contents |= markers | {"models/qwen/sub/deep/vocab.txt": b"a", "models/qwen/empty.txt": b""}
    folder = download(bucket, cache)
    assert contents(folder).keys() - {"none"} == FILES.keys() | {"empty.txt"}
    assert (folder / "sub" / "deep" / "vocab.txt").read_bytes() == b"a"
    assert download(bucket, cache) == folder


def test_a_folder_of_markers_has_no_model(bucket, cache):
    bucket.contents |= {"models/none/": b""}
    assert failure(bucket, cache, "s3://models/none").reason is Reason.NOT_FOUND


def test_a_copy_that_lost_a_file_is_completed(bucket, cache):
    folder = download(bucket, cache)
    (folder / "model-1.safetensors").unlink()
    before = len(bucket.asked)
    assert contents(download(bucket, cache)) == FILES
    assert [word for word in bucket.asked[before:] if "safetensors" in word] == ["GET /models/qwen/model-1.safetensors"]


@pytest.mark.parametrize(
    ("kind", "uri"),
    [
        ("bucket", "s3://models/other"),
        ("bucket", "s3://nowhere/qwen"),
        ("hub", "hf://owner/absent"),
        ("hub", "hf://owner/private"),
        ("hub", "hf://owner/model@absent"),
    ],
)
def test_a_source_that_does_not_exist_is_said_to_be_missing(request, cache, kind, uri):
    error = failure(request.getfixturevalue(kind), cache, uri)
    assert error.reason is Reason.NOT_FOUND
    assert uri in str(error)
    assert "correct the URI" in str(error)


def test_refused_credentials_of_a_bucket_are_said_to_be_refused(bucket, cache, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    error = failure(bucket, cache)
    assert error.reason is Reason.REFUSED
    assert "into the Secret of model.secretRef" in str(error)


def test_half_of_the_credentials_of_a_bucket_are_said_to_be_refused(bucket, cache, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert failure(bucket, cache).reason is Reason.REFUSED


def test_a_public_bucket_needs_no_credentials(bucket, cache, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert contents(download(bucket, cache)) == FILES


def test_a_token_opens_a_private_repository(hub, cache, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", object_store.TOKEN)
    assert contents(download(hub, cache, "hf://owner/private")) == FILES


@pytest.mark.parametrize(
    ("token", "uri", "sentence"),
    [
        ("hf_expired", "hf://owner/private", "refuses the token"),
        (object_store.TOKEN, "hf://owner/gated", "accept it there"),
        ("", "hf://owner/gated", "accept it there"),
    ],
)
def test_a_refused_token_is_said_to_be_refused(hub, cache, monkeypatch, token, uri, sentence):
    monkeypatch.setenv("HF_TOKEN", token)
    error = failure(hub, cache, uri)
    assert error.reason is Reason.REFUSED
    assert sentence in str(error)
    assert "into the Secret of model.secretRef" in str(error)


def test_a_model_that_is_larger_than_the_volume_is_not_begun(bucket, cache):
    bucket.stated_sizes["models/qwen/model-1.safetensors"] = 1 << 60
    error = failure(bucket, cache)
    assert error.reason is Reason.DISK_FULL
    assert "enlarge the volume of model.cache" in str(error)
    assert [path for path in bucket.fetched() if "safetensors" in path] == []


def test_a_cache_that_is_no_folder_is_said_to_be_unwritable(bucket, tmp_path):
    (tmp_path / "file").write_text("")
    error = failure(bucket, tmp_path / "file" / "cache")
    assert error.reason is Reason.UNWRITABLE
    assert "cannot be written by user" in str(error)


def test_a_store_that_does_not_answer_is_said_to_be_unreachable(bucket):
    where = bucket.url
    bucket.shutdown()
    bucket.server_close()
    place = bucket_origin.Bucket(weight_source.parse(URI), where, retried=datetime.timedelta(milliseconds=1))
    with pytest.raises(weight_report.WeightsError) as caught:
        place.files()
    assert caught.value.reason is Reason.UNREACHABLE
    assert f"{where} does not answer" in str(caught.value)


@pytest.mark.timeout(30)
def test_a_store_that_accepts_and_never_answers_is_said_to_be_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        short = datetime.timedelta(milliseconds=1)
        where = f"http://127.0.0.1:{server.getsockname()[1]}"
        place = bucket_origin.Bucket(weight_source.parse(URI), where, retried=short, silence=50 * short)
        with pytest.raises(weight_report.WeightsError) as caught:
            place.files()
    assert caught.value.reason is Reason.UNREACHABLE


@pytest.mark.timeout(30)
def test_a_content_that_stops_to_arrive_is_said_to_be_unreachable(bucket, tmp_path):
    bucket.contents.pop("models/qwen/SHA256SUMS")
    short = datetime.timedelta(milliseconds=200)
    place = bucket_origin.Bucket(weight_source.parse(URI), bucket.url, retried=short, silence=short)
    (file, *_) = place.files()
    bucket.gate.clear()
    with pytest.raises(weight_report.WeightsError) as caught:
        place.fetch(file, tmp_path)
    assert caught.value.reason is Reason.UNREACHABLE


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), TimeoutError(), RuntimeError("Xet: no answer")])
def test_a_hub_that_stops_to_answer_is_said_to_be_unreachable(hub, cache, monkeypatch, error):
    def fetch(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", fetch)
    found = failure(hub, cache, "hf://owner/model")
    assert found.reason is Reason.UNREACHABLE
    assert f"{hub.url} does not answer ({type(error).__name__}" in str(found)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, Reason.UNWRITABLE),
        (errno.EROFS, Reason.UNWRITABLE),
        (errno.ENOSPC, Reason.DISK_FULL),
        (errno.EIO, Reason.UNREACHABLE),
        (errno.ESTALE, Reason.UNREACHABLE),
        (errno.ENETUNREACH, Reason.UNREACHABLE),
    ],
)
def test_an_error_of_the_system_has_the_reason_that_says_what_helps(hub, cache, monkeypatch, number, reason):
    def fetch(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", fetch)
    assert failure(hub, cache, "hf://owner/model").reason is reason


def run_program(server, cache, tmp_path, uri):
    """The finished process, and the reason of the failure that it reported."""
    report = tmp_path / "report"
    command = [sys.executable, "-m", "tidegate_cli.main", "weights", uri, f"--cache={cache}", f"--report={report}"]
    done = subprocess.run(
        [*command, f"--endpoint={server.url}"], capture_output=True, text=True, check=False, timeout=60
    )
    return done, report.read_text() if report.exists() else ""


@pytest.mark.parametrize(("kind", "uri"), [("bucket", URI), ("hub", "hf://owner/model")])
def test_the_program_prints_its_progress_and_nothing_else(request, cache, tmp_path, kind, uri):
    done, report = run_program(request.getfixturevalue(kind), cache, tmp_path, uri)
    assert (done.returncode, report, done.stderr) == (0, "", "")
    assert done.stdout.splitlines() == ["0% of 11.7 KiB", "11.7 KiB are in the cache"]


def test_the_program_reports_the_reason_of_a_failure(bucket, cache, tmp_path):
    done, report = run_program(bucket, cache, tmp_path, "s3://models/other")
    assert (done.returncode, report) == (1, done.stderr.strip())
    assert weight_report.parse(report)[0] is Reason.NOT_FOUND
    done, _ = run_program(bucket, cache, tmp_path, "pvc://claim/folder")
    assert done.returncode == 2
    assert "write hf://OWNER/NAME or s3://BUCKET/FOLDER" in done.stderr


def test_an_engine_gets_one_format_of_the_weights():
    config = {"config.json", "tokenizer.model", "modeling.py"}
    several = {
        "model.safetensors",
        "pytorch_model.bin",
        "original/consolidated.pth",
        "onnx/model.onnx",
        ".gitattributes",
    }
    assert origin.needed(config | several) == config | {"model.safetensors"}
    assert origin.needed(config | {"pytorch_model.bin", "tf_model.h5"}) == config | {"pytorch_model.bin"}


@pytest.mark.parametrize(
    "name",
    ["/etc/model.json", "../model.json", "a/../../model.json", "./model.json", "a/./model.json", "a//model.json", "a/"],
)
def test_a_name_that_leads_out_of_the_folder_never_becomes_a_path(hub, cache, name):
    hub.contents[name] = b"{}"
    error = failure(hub, cache, "hf://owner/model")
    assert error.reason is Reason.DIFFER
    assert f"{name!r}, which is no path below" in str(error)
    assert not any(name in path for path in hub.fetched())
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_sources_have_folders_of_their_own():
    uris = ["s3://a/b", "s3://a-b", "s3://a/b/c", "hf://a/b", "hf://a/b@c"]
    names = {weight_source.parse(uri).folder(endpoint) for uri in uris for endpoint in (None, "http://x")}
    assert len(names) == 2 * len(uris)
    assert all("/" not in name for name in names)


def test_a_manifest_that_cannot_be_read_is_no_copy(tmp_path):
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / weight_cache.MANIFEST).write_text(json.dumps([]))
    assert weight_cache.Copy(tmp_path, "name").size() is None


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks, on which each process belongs to another pod."""

    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    pods = itertools.count(1)
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(socket, "gethostname", lambda: f"pod-{next(pods)}")


@pytest.mark.usefixtures("no_locks")
def test_without_file_locks_the_partial_folder_of_a_pod_that_is_gone_does_not_stay(bucket, cache):
    bucket.damaged["models/qwen/model-2.safetensors"] = b"x" * 7000
    assert failure(bucket, cache).reason is Reason.DIFFER
    bucket.damaged.clear()
    folder = download(bucket, cache)
    assert contents(folder) == FILES
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}


@pytest.mark.usefixtures("no_locks")
def test_without_file_locks_a_slower_pod_takes_the_copy_of_a_faster_one(monkeypatch, bucket, cache):
    fetched = bucket_origin.Bucket.fetch

    def fetch(self, file, folder):
        monkeypatch.setattr(bucket_origin.Bucket, "fetch", fetched)
        assert contents(download(bucket, cache)) == FILES
        fetched(self, file, folder)

    monkeypatch.setattr(weights_command, "AT_ONCE", 1)
    monkeypatch.setattr(bucket_origin.Bucket, "fetch", fetch)
    folder = download(bucket, cache)
    assert contents(folder) == FILES
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_copy_that_another_pod_finishes_at_the_last_moment_keeps_its_files(monkeypatch, tmp_path, is_whole):
    copy = weight_cache.Copy(tmp_path, "name")
    copy.begin()
    for folder in (copy.partial, copy.folder):
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(b"1")
    other = (copy.folder / "file").stat()
    looks, size = itertools.count(), weight_cache.Copy.size

    def seen(self):
        """The other pod finishes after two looks at the copy."""
        if next(looks) == 2 and is_whole:
            (self.folder / weight_cache.MANIFEST).write_text(json.dumps({"files": {"file": 1}}))
        return size(self)

    monkeypatch.setattr(weight_cache.Copy, "size", seen)
    copy.finish({"file": 1})
    assert os.path.samestat(other, (copy.folder / "file").stat()) is is_whole
    assert copy.size() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


@pytest.mark.usefixtures("no_locks")
def test_without_file_locks_the_copy_that_an_engine_reads_stays(tmp_path):
    first, second, third = (weight_cache.Copy(tmp_path, "name") for _ in range(3))
    with first.locked(print), second.locked(print), third.locked(print):
        for copy in (first, second):
            copy.begin()
            (copy.partial / "file").write_bytes(b"1")
        first.finish({"file": 1})
        with (first.folder / "file").open("rb") as read:
            second.finish({"file": 1})
            third.begin()
            assert os.path.samestat(os.fstat(read.fileno()), (first.folder / "file").stat())
        (third.partial / "file").write_bytes(b"1")
        third.finish({"file": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name", "name.lock"]
