"""Compiles kernels with NVRTC for many cards; run by `cargo xtask cuda-check`, which says what it needs.

    compile.py LIBNVRTC FOLDER FILE.cu... -- OPTION... -- ARCHITECTURE...

In front of each file go common.cuh and, if its name ends in _mma, mma.cuh, both from FOLDER. One line a kernel: registers
and bytes spilled on every architecture, from what ptxas says. Ends with status 1 if anything does not compile or is warned
about.
"""

import concurrent.futures
import ctypes
import pathlib
import re
import sys

USED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.S,
)


def load(library):
    global nvrtc
    # NVRTC asks the loader for this one by name, which finds it once it is loaded.
    for builtins in sorted(pathlib.Path(library).parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(library)


def text_of(folder, file):
    headers = ["common.cuh"] + ["mma.cuh"] * file.stem.endswith("_mma")
    parts = [pathlib.Path(folder) / header for header in headers] + [file]
    return "\n".join(f'#line 1 "{part.name}"\n{part.read_text()}' for part in parts)


def compile_file(name, text, options):
    """The status and the log."""
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    if status != 0:
        return status, "the program could not be made"
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        if size.value == 0:
            status = -1
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode()


def main():
    library, folder, *rest = sys.argv[1:]
    first, second = (i for i, word in enumerate(rest) if word == "--")
    files, options, architectures = rest[:first], rest[first + 1 : second], rest[second + 1 :]
    failed = False
    print(f"{'registers / bytes spilled':40}" + "".join(f"{architecture:>13}" for architecture in architectures))
    # A process each: one compiles one program at a time. The largest sources come first.
    files = sorted(map(pathlib.Path, files), key=lambda file: -file.stat().st_size)
    with concurrent.futures.ProcessPoolExecutor(initializer=load, initargs=[library]) as pool:
        found = {
            (file, architecture): pool.submit(compile_file, file.name, text_of(folder, file), [
                f"--gpu-architecture={architecture}", "--ptxas-options=-v", *options
            ])
            for file in files
            for architecture in architectures
        }
    for file in sorted(files):
        table = {}
        for architecture in architectures:
            status, log = found[file, architecture].result()
            if status != 0 or "warning" in log:
                failed = True
                print(f"{file.name} for {architecture}: status {status}\n{log}")
            for kernel, _, stores, _, registers in USED.findall(log):
                table.setdefault(kernel, {})[architecture] = f"{registers} / {stores}"
        for kernel, row in table.items():
            print(f"{kernel:40}" + "".join(f"{row.get(architecture, '?'):>13}" for architecture in architectures))
    sys.exit(1 if failed else 0)


main()
