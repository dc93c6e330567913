"""Six photographs to try a network on, in the public domain, so that every command has something real to look at.

All six come from scikit-image, where they are larger. The shorter side has 256 pixels.
"""

from __future__ import annotations

from pathlib import Path

from dmst.errors import unknown_name

PHOTOS = {  # name -> what it shows, by whom, and its licence
    "cat": "Chelsea, by Stefan van der Walt, CC0",
    "rocket": "Falcon 9 with DSCOVR, by SpaceX, public domain",
    "astronaut": "Eileen Collins, by NASA, public domain",
    "coffee": "a cup of coffee, by Rachel Michetti, CC0",
    "photographer": "a man with a camera, by Lav Varshney, CC0",
    "galaxies": "the Hubble deep field, by NASA, public domain",
}


def photo(name: str) -> Path:
    """The file of a photograph that ships: `photo("cat")`."""
    if name not in PHOTOS:
        raise unknown_name("photograph", name, PHOTOS)
    return Path(__file__).parent / f"{name}.jpg"
