"""General signatures of software that does not fit: libraries, compilers, damaged files, shapes, numbers, user code."""

from __future__ import annotations

import re

from furlong.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.postmortem.log_text import LogText, Signature, evidence_of, general

LIBRARIES = re.compile(
    r"site-packages|dist-packages|/lib/python\d|<frozen|<string>|/(furlong|sglang|megatron|torch|ray)/"
)
FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+)(, in (?P<function>\S+))?')


def _user_code(text: LogText, match: re.Match[str]) -> Diagnosis:
    """HOOK01 with the innermost frame of a file that is not of a library."""
    evidence = evidence_of(text, match)
    frames = list(FRAME.finditer(text.content, 0, match.start()))
    own = next((frame for frame in reversed(frames) if not LIBRARIES.search(frame["file"])), None)
    where = (
        f"{own['file']}, line {own['line']}" if own is not None else f"{evidence['source']}, line {evidence['line']}"
    )
    return diagnosis(
        "HOOK01",
        f"code of yours raised an exception ({where}): {evidence['text']}",
        cause="The function, or something that it calls, does not handle this value.",
        remedy=f"fix it at {where}; `furlong reward test` calls a reward function without a run",
        evidence=evidence,
    )


USER_KINDS: tuple[Signature, ...] = (
    Signature(
        "HOOK01",
        _user_code,
        re.compile(r"[^\n]*(Error|Exception)\b[^\n]*"),
        innermost=re.compile(rf"^(?!.*({LIBRARIES.pattern}))"),
        is_general=True,
    ),
    general(
        "HOOK01",
        r"[^\n]*(SyntaxError|IndentationError|TabError)[^\n]*",
        "a file is not valid Python",
        "fix it at that line; if it is a library's, it needs a newer Python than this one",
        "A mistake in the file, or it is written for another version of Python.",
    ),
)

LIBRARY_KINDS: tuple[Signature, ...] = (
    general(
        "HOOK01",
        r"[^\n]*(re-initialize CUDA in forked|start method[^\n]*(spawn|already)|Can't pickle|[Cc]annot pickle|"
        r"PicklingError|bootstrapping phase|freeze_support|attribute lookup \S+ on)[^\n]*",
        "an object or CUDA does not cross into another process",
        "start processes with the `spawn` method, and define functions and classes at the top level of a module "
        '(no lambdas, no functions inside functions), below `if __name__ == "__main__":` in a script',
        "A forked process cannot use CUDA, and only names at the top level of a module can be sent to another process.",
    ),
    general(
        "HOOK01",
        r"[^\n]*([Ee]vent loop is (closed|already running)|attached to a different (event )?loop|"
        r"no running event loop|asyncio\.run\(\) cannot be called|was never awaited)[^\n]*",
        "asynchronous code uses another event loop",
        "create clients, locks and semaphores of asyncio inside the function that uses them, and do not call "
        "asyncio.run there",
        "An object of asyncio belongs to the event loop in which it was created.",
    ),
    general(
        "ENV01",
        r"[^\n]*(numpy\.\w+ size changed|compiled using NumPy|numpy\.?_?core|_ARRAY_API|API version 0x|"
        r"binary incompatibility|numpy[^\n]*(incompatib|\bABI\b|version incompatib))[^\n]*",
        "a package was built for another numpy",
        "install numpy and that package again together (`pip install --force-reinstall`); packages built for numpy 1 "
        'need `pip install "numpy<2"`',
        "The binary interface of numpy 2 differs from that of numpy 1.",
    ),
    general(
        "ENV01",
        r"[^\n]*(Descriptors cannot|protobuf|_pb2\b|protoc\b|MessageFactory)[^\n]*",
        "a package was generated for another protobuf",
        'install a protobuf that fits (`pip install "protobuf<4"` for old packages), or the newest version of the '
        "package; PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python is a slow way around it",
        "Files that protoc generated only work with the range of versions that they were generated for.",
    ),
    general(
        "ENV01",
        r"[^\n]*(GLIBC_\d|GLIBCXX|CXXABI|libstdc\+\+)[^\n]*",
        "a compiled library needs newer system libraries",
        "use a newer system or container image; for GLIBCXX, a newer libstdc++ first in LD_LIBRARY_PATH (conda: "
        "`conda install -c conda-forge libstdcxx-ng`); or build the package on this system",
        "It was built on a system with a newer glibc or libstdc++ than this one.",
    ),
    general(
        "ENV01",
        r"[^\n]*(cannot open shared object|[Ff]ailed to load (dynamic|shared) library|DLL load failed|"
        r"(Could not|Unable to|Failed to) (load|find|open)( library)? lib\w+|lib\w+\.so[.\d]*[^\n]*(not found|missing))"
        r"[^\n]*",
        "a shared library is missing",
        "install the package of CUDA or of the system that has it, of the version in its name, or add its folder to "
        "LD_LIBRARY_PATH (`ldconfig -p` lists those that are found); libcuda.so comes with the driver",
        "The package was built for another version of CUDA, or the library is in a folder that is not searched.",
    ),
    general(
        "ENV01",
        r"[^\n]*(Python\.h|([Ff]ailed to find|[Nn]o|[Cc]annot find|not find|[Mm]issing)( a| an| any| the)?( working| "
        r"host)? (C|C\+\+|CUDA|c\+\+)? ?compiler|cc1plus|(gcc|g\+\+|clang|cc|c\+\+)\b[^\n]*(not found|non-zero exit|"
        r"command not|failed)|CppCompileError|C\+\+ compile error)[^\n]*",
        "code cannot be compiled at run time",
        "install a compiler and the headers of Python (`apt install build-essential python3-dev`), and set CC if it "
        "has another name; or use --attention-backend and engine options that need no compiled kernels",
        "Triton and torch.compile build kernels on this machine, which has no compiler or no Python.h.",
    ),
    general(
        "ENV01",
        r"(?![^\n]*\[Errno )[^\n]*(CUDA_HOME|CUDA_PATH|\bnvcc\b|[Nn]inja|ptxas|PTXAS|[Uu]nsupported gpu arch|NVRTC|"
        r"nvrtc|"
        r"building extension|compiling objects|CompilationError|CompileError|[Ii]nductor[^\n]*[Ff]ail|sm_\d+a?\b[^\n]*"
        r"(not (defined|supported|compatible)|unsupported))[^\n]*",
        "a kernel cannot be compiled",
        "install the CUDA toolkit of PyTorch's CUDA version (CUDA_HOME names its folder; it must know this GPU) and "
        "`pip install ninja`, or a package with compiled kernels for this GPU; clear ~/.triton and "
        "~/.cache/torch_extensions afterwards",
        "The toolkit (nvcc, ptxas, ninja) is missing, or older than the GPU.",
    ),
    general(
        "ENV01",
        r"[^\n]*(not supported in this architecture|requires? (a )?(compute capability|GPU with|SM ?\d+|sm_?\d+|"
        r"[Hh]opper|[Bb]lackwell|[Aa]mpere)|compute capability \(?\d|[Oo]nly supports? [^\n]*GPUs?|"
        r"out of resource|OutOfResources|[Uu]nsupported (GPU|device|architecture))[^\n]*",
        "this GPU does not support a kernel or a number format",
        "use another format (bfloat16 instead of FP8, another quantization) or other kernels (--attention-backend, "
        "--sglang-attention-backend), or a newer GPU",
        "The kernel or the format needs a newer GPU.",
    ),
    general(
        "ENV01",
        r"[^\n]*([Ii]llegal instruction|SIGILL)[^\n]*",
        "a library uses instructions that this CPU lacks",
        "install it for this CPU (build it on this machine, or an older release); `python -X faulthandler` names the "
        "import that fails",
        "It was built for a newer CPU (AVX2, AVX-512), or the virtual machine hides instructions.",
    ),
    general(
        "ENV01",
        r"[^\n]*(undefined symbol|symbol \S+, version|not defined in file|operator \S+ does not exist|"
        r"symbol lookup error|invalid ELF header|wrong ELF class|incompatible function "
        r"signature|\bABI\b)[^\n]*",
        "compiled libraries do not fit each other",
        "run `furlong env`, which imports each one, and install them again for this PyTorch (flash-attn, "
        "transformer-engine and kernels of the engine have one build per PyTorch, CUDA and C++ ABI)",
        "One was built for another version of PyTorch, of CUDA or of the C++ ABI.",
    ),
    general(
        "ENV01",
        r"[^\n]*(No module named|ModuleNotFoundError|seems to be not installed|is not installed|not installed\b|"
        r"[Pp]lease (pip )?install|(you need|have) to (pip )?install|need to have [^\n]* installed|"
        r"PackageNotFoundError|requires the [\w-]+ (library|package))[^\n]*",
        "a package is missing",
        "install it into the environment of this process (`pip install NAME`, on every machine); `furlong env` lists "
        "what furlong uses. The module of a hook must be importable there: name its file, or set PYTHONPATH",
        "It is not installed, or another Python runs there.",
    ),
    general(
        "ENV01",
        r"[^\n]*(cannot import name|partially initialized module|module '[\w.]+' has no attribute|Pydantic\w+Error|"
        r"'[A-Z]\w+' object has no attribute|"
        r"unexpected keyword argument|missing \d+ required (positional|keyword)|takes \d+ positional|"
        r"VersionConflict|DistributionNotFound|requires? [\w.-]+ ?[<>=!~]=|but (is|found|you have) \S*\d+\.\d+)[^\n]*",
        "the versions of two packages do not fit, or a function is called with other arguments",
        "run `furlong env` and install the versions that it prints; if the traceback ends in a file of yours, compare "
        "the call with the installed version of the library",
        "One package was written for another version of the other.",
    ),
    general(
        "ENV01",
        r"[^\n]*(RuntimeEnvSetupError|[Rr]untime ?[Ee]nv(ironment)?[^\n]*([Ff]ail|exceed)|working_dir)[^\n]*",
        "Ray cannot prepare the environment of the workers",
        "exclude large files from the working directory (`excludes` of runtime_env), or install the packages on every "
        "machine beforehand",
        "The folder that Ray copies is too large, or packages cannot be installed on a worker's machine.",
    ),
    general(
        "CFG05",
        r"[^\n]*([Ee]nvironment variables?|env var)[^\n]*(not set|must be|requires?|to (1|0|true)|missing)[^\n]*|"
        r"[^\n]*requires setting the environment variable[^\n]*",
        "an environment variable is missing",
        "set it in the shell that starts the run, and for trainer ranks with --train-env-vars",
        "A library reads a setting from the environment of its process.",
    ),
)

FOLDER_KINDS: tuple[Signature, ...] = (
    general(
        "CFG05",
        r"(?![^\n]*nvcc)[^\n]*(unrecognized arguments?|arguments? are required|invalid \w+ value:|invalid choice:|"
        r"[Nn]o such option|"
        r"expected (one|at least one) argument|[Uu]nknown (option|flag|argument))[^\n]*",
        "a program was started with arguments that it does not accept",
        "compare them with its `--help`; flags of the engine must exist in the installed version of SGLang (`furlong "
        "env`)",
        "The argument is misspelled, or of another version of the program.",
    ),
    general(
        "CKPT07",
        r"[^\n]*(trust_remote_code|contains custom code|remote code)[^\n]*",
        "the model needs code of its folder",
        "use a model that furlong supports (docs: Models): code of a model's folder is never run",
        "Its architecture is not part of transformers.",
    ),
    general(
        "CKPT07",
        r"[^\n]*(backend tokenizer|sentencepiece|tiktoken|ModelWrapper|untagged enum|[Tt]okenizer class|"
        r"slow tokenizer|tokenizer\.(json|model)|[Tt]okenizer[^\n]*(fail|not found|missing))[^\n]*",
        "the tokenizer cannot be read",
        "install newer tokenizers and transformers, and sentencepiece and tiktoken (`pip install -U tokenizers "
        "transformers sentencepiece tiktoken`); then download tokenizer.json again",
        "tokenizer.json was written by a newer version of the tokenizers library, it is damaged, or the folder only "
        "has a slow tokenizer.",
    ),
)

FILE_KINDS: tuple[Signature, ...] = (
    general(
        "CKPT01",
        r"[^\n]*(CheckpointingException|not found in (the )?checkpoint|([Mm]issing|[Uu]nexpected) keys?\b|"
        r"checkpoint[^\n]*(mismatch|incompatible|different)|(mismatch|incompatible)[^\n]*checkpoint|"
        r"state_dict[^\n]*(mismatch|missing|unexpected))[^\n]*",
        "a checkpoint does not fit the model",
        "use the checkpoint of this model for --load, or --hf-checkpoint and the flags that it was trained with; "
        "`furlong check DIR` lists its tensors",
        "It was saved from another model, or with other flags for experts, layers or vocabulary.",
    ),
    general(
        "CKPT04",
        r"[^\n]*(central directory|PytorchStreamReader|UnpicklingError|invalid load key|Ran out of input|\bEOFError|"
        r"BadZipFile|not a zip file|SafetensorError|Expecting (value|property)|UnicodeDecodeError|"
        r"Arrow(Invalid|IOError)|[Pp]arquet[^\n]*([Mm]agic|corrupt|invalid)|[Cc]orrupt(ed)?\b|[Tt]runcated|"
        r"[Cc]hecksum (mismatch|error|fail)|unexpected (end of|EOF)|incomplete (file|download)|[Ii]nvalid magic|"
        r"git-lfs|Dataset\w*Error|meta tensor|[Bb]ad magic number)[^\n]*",
        "a file is damaged, cut off, or not what its name says",
        "write or download it again (`head -c 200 FILE` shows a Git LFS pointer or a page of HTML); `furlong check "
        "DIR` names damaged files of models and checkpoints",
        "A download or a save was interrupted, the file is a Git LFS pointer (`git lfs pull`), or another process "
        "still writes it.",
    ),
)

NUMERIC_KINDS: tuple[Signature, ...] = (
    general(
        "NUM04",
        r"[^\n]*(\b(nan|NaN|NAN|inf|Inf|infs?|infinite|[Nn]on-?finite|not finite|NaN/Inf)s?\b[^\n]*(loss|grad|norm|"
        r"logit|weight|activation|prob|input|output|tensor|reward|advantage)|(loss|grad\w*|norm|logits?|activation\w*|"
        r"output\w*|prob\w*|tensor|reward\w*|advantage\w*)[^\n]*(\b(nan|NaN|NAN|inf|Inf|[Nn]on-?finite|"
        r"not finite)s?\b|overflow\w*"
        r"|diverge\w*)|loss scale[^\n]*(minimum|zero|underflow)|[Mm]inimum loss scale|FloatingPointError|"
        r"overflow encountered)[^\n]*",
        "loss, gradient or logits are not finite",
        "lower --lr or --clip-grad, use --bf16 instead of --fp16 (a loss scale at its minimum is an overflow of "
        "float16), check rewards and samples of that step for NaN; resume from a checkpoint before it",
        "The learning rate is too high, activations overflow, or a weight, reward or sample is not finite.",
    ),
)

MODEL_KINDS: tuple[Signature, ...] = (
    general(
        "CFG05",
        r"[^\n]*(not (evenly )?divisible|(must|should|has to|needs to) be (\w+ )?(divisible|a multiple)|indivisible|"
        r"evenly (split|divi)|world[ _]size[^\n]*(must|match|expected|not equal|!=|larger|smaller)|"
        r"(tensor|pipeline|expert|context|data|sequence)[-_ ](model[-_ ])?parallel\w*[^\n]*(must|should|mismatch|"
        r"invalid|"
        r"not))[^\n]*",
        "sizes of the model, the batch or the machine do not divide by a parallel size",
        "choose --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size and "
        "--expert-model-parallel-size (of engines --rollout-num-gpus-per-engine) whose product divides the GPUs and "
        "each of which divides heads, layers or experts; `furlong doctor` with the same flags checks them",
        "Each GPU gets the same number of heads, layers, experts, tokens or samples; with --sequence-parallel the "
        "tokens of a micro-batch divide by the tensor-parallel size.",
    ),
    general(
        "CKPT04",
        r"[^\n]*(device-side assert|[Ii]ndex\w*[^\n]*out of (range|bounds)|srcIndex|SelectDimSize|"
        r"Assertion [^\n]*(ind(ex|ices)|idx|vocab)[^\n]*failed)[^\n]*",
        "an index is beyond the end of a tensor",
        "run `furlong doctor` with the same flags, which compares tokenizer and embedding; lower "
        "--rollout-max-context-len to max_position_embeddings; CUDA_LAUNCH_BLOCKING=1 (--train-env-vars) names the "
        "operator",
        "A token id is not in the embedding (the tokenizer, or a custom function that makes ids, is of another model), "
        "or a sequence is longer than the model's positions.",
    ),
    general(
        "CKPT04",
        r"[^\n]*(shapes? [^\n]*(cannot be multiplied|mismatch|incompatible|not aligned|do(es)?n't match|must match)|"
        r"mat1 and mat2|size of tensor a|[Ss]izes of tensors must|shape '\[[^\]]*\]' is invalid|size mismatch|"
        r"[Ss]plit sizes|total dim|"
        r"(shape|size)s?\b[^\n]*\b(expected|but got|got)\b|[Ee]xpected[^\n]*(shape|size|dim)[^\n]*(got|but)|"
        r"(could|can) ?not( be)? broadcast)[^\n]*",
        "tensors have sizes that do not fit",
        "`furlong check DIR` compares config.json with the tensors of a model; if they fit, compare the lengths that a "
        "custom function of yours returns (log-probs, masks and rewards: one per response token), and try without "
        "tensor, context and sequence parallelism",
        "config.json is that of another model, or a part of the batch is split over ranks and another is not.",
    ),
)
