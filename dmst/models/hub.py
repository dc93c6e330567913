"""Networks on the Hugging Face Hub: the two files of a saved model and a card, in a repository of the hub.

    dmst.push_to_hub(model, "owner/name")                    returns the address, with the commit: hf://owner/name@3f2a...
    dmst.load_model("hf://owner/name@3f2a...")               these very weights; without @ the newest

Weights are safetensors, whose hash stands in the config; no code is loaded. Downloads are kept in the hub's own cache.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmst import words
from dmst.errors import BadFileError, FetchError, OptionError, SaveError, in_one_line, need, shown

if TYPE_CHECKING:
    from dmst.models.vision import VisionModel

SCHEME = "hf://"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
ADDRESS = re.compile(rf"({NAME}/{NAME})(?:@([A-Za-z0-9._/-]+))?")


def parse(address: str, revision: str | None = None) -> tuple[str, str | None]:
    """Repository and revision of "hf://owner/name@revision", or of "owner/name"."""
    found = ADDRESS.fullmatch(address.removeprefix(SCHEME))
    if found is None or (revision and found[2]):
        raise OptionError(f"{shown(address)} is no address on the hub: write hf://owner/name, or hf://owner/name@revision.")
    return found[1], revision or found[2]


def download(
    address: str, *, revision: str | None = None, token: str | bool | None = None, cache_dir: str | Path | None = None,
    local_files_only: bool = False, force_download: bool = False,
) -> Path:  # fmt: skip
    """The folder of a saved model, from the hub or from its cache."""
    from dmst.models.files import CONFIG, WEIGHTS

    hub, (name, revision) = need("huggingface_hub", "hub"), parse(address, revision)
    with _said(name, revision):
        folder = hub.snapshot_download(
            name, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only,
            force_download=force_download, allow_patterns=[CONFIG, WEIGHTS],
        )  # fmt: skip
    if not Path(folder, CONFIG).exists():
        raise BadFileError(f"{SCHEME}{name} has no {CONFIG}: it holds no network that dmst or timm saved.")
    return Path(folder)


def push_to_hub(
    model: VisionModel, repo_id: str, *, commit_message: str = "Push a network of dmst", private: bool | None = None,
    token: str | bool | None = None, branch: str | None = None, create_pr: bool = False, card: str | None = None,
) -> str:  # fmt: skip
    """Save `model` and upload it to `repo_id`, which is made if it is not there. The address of what was uploaded.

    `repo_id` may name a branch, owner/name@branch. `card` is the text of its README.md; if not given, a repository that has
    none gets one that says what the network is and how to load it.
    """
    from dmst.models.files import save_model

    hub, (name, branch) = need("huggingface_hub", "hub"), parse(repo_id, branch)
    with tempfile.TemporaryDirectory() as place:
        folder = save_model(model, Path(place) / "model")
        with _said(name, branch):
            api = hub.HfApi(token=token)
            api.create_repo(name, private=private, exist_ok=True)
            if branch:
                api.create_branch(name, branch=branch, exist_ok=True)
            if card or not api.file_exists(name, "README.md", revision=branch):  # never over what its owner wrote
                (folder / "README.md").write_text(card or _card(model, name), encoding="utf-8")
            done = api.upload_folder(
                repo_id=name, folder_path=folder, commit_message=commit_message, revision=branch, create_pr=create_pr
            )
    return f"{SCHEME}{name}@{done.oid}"


class HubMethods:
    """The names that users of the hub's `PyTorchModelHubMixin` know."""

    def save_pretrained(
        self, save_directory: str | Path, *, repo_id: str | None = None, push_to_hub: bool = False, **options: Any
    ) -> str | None:
        """Save to a folder, over what was saved there before; with `push_to_hub` also to the hub, whose address is returned."""
        from dmst.models.files import save_model

        if push_to_hub and not repo_id:
            raise OptionError("push_to_hub is True: give repo_id, owner/name, too.")
        save_model(self, save_directory, overwrite=True)  # type: ignore[arg-type]
        return self.push_to_hub(str(repo_id), **options) if push_to_hub else None

    @classmethod
    def from_pretrained(cls, name: str | Path, *, unverified: bool = False, device: Any = None, **options: Any) -> VisionModel:
        """Of a folder, or of owner/name on the hub; options are those of `download`: revision, token, cache_dir..."""
        from dmst.models.files import load_model

        here = Path(name).is_dir() and not str(name).startswith(SCHEME)
        if here and any(options.values()):
            raise OptionError(f"{name} is a folder: {', '.join(options)} are for networks on the hub.")
        return load_model(name if here else download(str(name), **options), unverified=unverified, device=device)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        return push_to_hub(self, repo_id, **options)  # type: ignore[arg-type]


@contextmanager
def _said(name: str, revision: str | None) -> Iterator[None]:
    """What the hub's client raises, as one line with a remedy."""
    errors: Any = need("huggingface_hub.errors", "hub")
    where = f"{SCHEME}{name}" + (f"@{revision}" if revision else "")
    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        raise FetchError(
            f"{where} is not in the cache, and the hub cannot be reached ({in_one_line(error)}). Connect to the network, or "
            "load a folder."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{where}: the repository has no such revision. Name a branch, a tag or a commit of it.") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"{where} is not on the hub, or is private: check the name, and log in (`hf auth login`) for what is private."
        ) from error
    except errors.HFValidationError as error:
        raise OptionError(f"{where} is no address on the hub ({in_one_line(error)}).") from error
    except errors.OfflineModeIsEnabled as error:
        raise FetchError(f"{where}: the hub is not asked, because HF_HUB_OFFLINE is set. Unset it.") from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):  # the disk's, not the hub's
            raise SaveError(f"{where}: {in_one_line(error)}. Make room, or choose another cache (HF_HOME).") from error
        raise FetchError(f"{where}: the hub refused ({in_one_line(error)}). Try again later, or check the token.") from error
    except errors.HfHubHTTPError as error:
        raise FetchError(f"{where}: the hub refused ({in_one_line(error)}). Try again later, or check the token.") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "huggingface_hub"):
            raise
        raise FetchError(f"{where}: the hub cannot be reached ({in_one_line(error)}). Connect to the network.") from error


def _card(model: VisionModel, name: str) -> str:
    config, count = model.config, sum(p.numel() for p in model.parameters())
    height, width = config.img_size  # type: ignore[misc]
    classes = ", ".join(map(words.visible, model.class_names[:20])) + (", ..." if len(model.class_names) > 20 else "")
    return f"""---
library_name: dmst
pipeline_tag: image-classification
tags:
- image-classification
- dmst
- timm
---

# {name}

A {config.name} of [dmst](https://arxiv.org/abs/2601.17042): operator `{config.operator}`, {count:,} parameters, images of
{height} x {width} pixels, {config.num_classes} classes{f" ({classes})" if classes else ""}.

```python
import dmst

model = dmst.load_model("{SCHEME}{name}")
```

In timm: `import timm, dmst.integrations.timm`, then `timm.create_model("hf-hub:{name}", pretrained=True)`.
"""
