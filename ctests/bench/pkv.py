"""pagedkv for Python by ctypes: structs, constants and functions as include/pagedkv.h declares them, read from it at import."""

import ctypes
import re
from pathlib import Path

HEADER = (Path(__file__).resolve().parents[2] / "include/pagedkv.h").read_text()
PLAIN = {
    "size_t": ctypes.c_size_t, "float": ctypes.c_float, "char": ctypes.c_char, "pkv_status": ctypes.c_int32,
    "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
}


def declared():
    """name -> ctypes.Structure of every struct that has a body."""
    types = {}
    for body, name in re.findall(r"^typedef struct \w+ \{\n(.*?)^\} (\w+);", HEADER, re.M | re.S):
        fields = []
        for line in filter(None, (re.sub(r"//.*", "", line).strip() for line in body.splitlines())):
            kind, star, field, extent = re.fullmatch(r"(?:const )?(?:struct )?(\w+) (\*?)(\w+)(?:\[(\d+)\])?;", line).groups()
            kind = ctypes.c_void_p if star or kind.endswith("_fn") else PLAIN.get(kind) or types[kind]
            fields.append((field, kind * int(extent) if extent else kind))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types


STRUCTS = declared()
CONSTANTS = {name: int(value) for name, value in re.findall(r"^#define (PKV_\w+) (\d+)$", HEADER, re.M)}


class Failed(Exception):
    """A call that was refused: the status' name, the argument and the message."""


def struct(name, **fields):
    """A zeroed `pkv_NAME` with its struct_size set, then the fields."""
    made = STRUCTS["pkv_" + name]()
    if hasattr(made, "struct_size"):
        made.struct_size = ctypes.sizeof(made)
    for field, value in fields.items():
        if not hasattr(made, field):
            raise AttributeError(f"pkv_{name} has no field {field}")
        setattr(made, field, ctypes.addressof(value) if isinstance(value, ctypes.Structure) and not isinstance(getattr(made, field), ctypes.Structure) else value)
    return made


class Library:
    """Loaded from a path. `call` raises `Failed` where a function does not give PKV_OK."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        for function in ("pkv_build_info", "pkv_version", "pkv_status_name"):
            getattr(self.lib, function).restype = ctypes.c_char_p

    def build_info(self):
        return self.lib.pkv_build_info().decode()

    def call(self, name, *arguments):
        error = struct("error")
        arguments = [ctypes.byref(a) if isinstance(a, ctypes.Structure) and type(a).__name__.endswith(("_params", "_options")) else a for a in arguments]
        status = getattr(self.lib, "pkv_" + name)(*arguments, ctypes.byref(error))
        if status:
            raise Failed(f"pkv_{name}: {self.lib.pkv_status_name(status).decode()} {error.argument.decode()}: {error.message.decode()}")

    def context(self, threads):
        context = ctypes.c_void_p()
        self.call("context_create", struct("context_options", abi_version=CONSTANTS["PKV_ABI_VERSION"], num_threads=threads), ctypes.byref(context))
        return context

    def collection(self, context, **options):
        collection = ctypes.c_void_p()
        self.call("collection_create", context, struct("collection_options", **options), ctypes.byref(collection))
        return collection

    def kernel(self, context, name, params):
        """The call of a kernel as a function without arguments: the workspace is asked for and taken once."""
        bytes_ = ctypes.c_size_t()
        self.call(name + "_workspace_size", context, params, ctypes.byref(bytes_))
        memory = ctypes.create_string_buffer(bytes_.value + 256)
        start = -(-ctypes.addressof(memory) // 256) * 256
        function, error = getattr(self.lib, "pkv_" + name), struct("error")
        arguments = (context, STRUCTS["pkv_stream"](None), ctypes.byref(params), STRUCTS["pkv_buffer"](start if bytes_.value else None, bytes_.value), ctypes.byref(error))

        def run(keep=(memory, params, context)):
            status = function(*arguments)
            if status:
                raise Failed(f"pkv_{name}: {self.lib.pkv_status_name(status).decode()} {error.argument.decode()}: {error.message.decode()}")

        run.workspace = bytes_.value
        return run
