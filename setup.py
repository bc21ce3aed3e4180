"""The native kernels, built with the package where there is a C++ compiler; see pyproject.toml."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = runpy.run_path(str(Path(__file__).parent / "kernels" / "csrc" / "build.py"))


class BuildNative(build_ext):
    """One shared library, loaded by ctypes: it depends on no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """``arbor.kernels.libarbor_native`` -> ``arbor/kernels/libarbor_native.so``."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile; a failure is reported, and arbor then runs in torch."""
        try:
            NATIVE["build"](Path(self.get_ext_fullpath(ext.name)))
        except (OSError, RuntimeError) as error:
            print(f"warning: the native kernels were not built: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        """The library, if it was built."""
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self) -> None:
        """In an editable installation the library lies in the source tree, once built."""
        build_py: Any = self.get_finalized_command("build_py")
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            folder = Path(build_py.get_package_dir(ext.name.rpartition(".")[0]))
            if built.exists():
                self.copy_file(str(built), str(folder / built.name))


class Wheel(bdist_wheel):
    """A wheel for any Python 3 of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-PLATFORM``, or ``py3-none-any`` without the library."""
        tag: tuple[str, str, str] = super().get_tag()
        return ("py3", "none", tag[2])


extensions = [Extension("arbor.kernels.libarbor_native", [])] if NATIVE["compiler"]() else []
setup(ext_modules=extensions, cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel})
