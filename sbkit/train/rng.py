"""The state of every random number generator that training draws from, as tensors."""

from __future__ import annotations

import random

import numpy as np
import torch


def capture(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Python's, numpy's, torch's and the device's generators now: tensors on the CPU, without a host sync."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor(
            [legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]], dtype=torch.float64
        ),
        "torch": torch.get_rng_state(),
    }
    device = torch.device(device)
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
    """Set all generators to a captured state; the device's only if one was captured."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    pos, has_gauss, value = state["numpy_rest"].tolist()
    np.random.set_state({
        "bit_generator": "MT19937",
        "state": {"key": state["numpy"].numpy().astype(np.uint32), "pos": int(pos)},
        "has_gauss": int(has_gauss), "gauss": value,
    })
    torch.set_rng_state(state["torch"])
    device = torch.device(device)
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
