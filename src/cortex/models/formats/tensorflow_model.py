"""The file of a SavedModel: its version, its signatures, and whether its graph can reach more than its own data.

A graph is a program. TensorFlow has operations that read and write files, open connections and call Python, and it runs
parts of a graph while it loads it. So all operations of all graphs and functions must be in `_SAFE`. The operations of
the saver are the exception: those that restore the variables may read the model's own checkpoint only, and no part of
the graph that loading or calling it runs may write one.

Field numbers are those of tensorflow/core/protobuf/saved_model.proto and of the files that it imports.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from cortex.errors import ModelFormatError
from cortex.models.formats.protobuf import Field, MessageError, fields, text

#: Signatures to use, in this order, if a model has several and none is configured. TensorFlow 2 and Keras export the
#: second along with others, and it is the default of TensorFlow Serving.
PREFERRED_SIGNATURES = ("predict", "serving_default")
#: Signatures for internal use of exporters, such as `__saved_model_init_op`.
_INTERNAL_PREFIX = "__saved_model_"
_SERVE = "serve"  #: the tag of the graph for serving; exports may contain others, for training
_RESTORE = "RestoreV2"
_WRITE = frozenset({"SaveV2", "MergeV2Checkpoints"})
_DEFAULT_CHECKPOINT = b"model"  #: the name that savers of TensorFlow 1 have until the loader passes the path
#: Numbers of the types in types.proto that have a JSON form, and the names of others that tensors may have.
JSON_TYPES = frozenset((*range(1, 8), 9, 10, 14, 17, 19, 22, 23))
_OTHER_TYPES = {8: "DT_COMPLEX64", 18: "DT_COMPLEX128"}
#: Operations have names in camel case; functions that have none can't be mistaken for them.
_OPERATION = re.compile(r"_*[A-Z]")
_SHOWN_OPERATIONS = 5
_MAX_FIELDS = 5_000_000  #: of all messages together; reading them takes some ten seconds
_MAX_DEPTH = 20  #: of attributes in each other
_MIN_FUNCTION_BYTES = 5  #: of an attribute that names a function

Types = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The version, the signatures and the reach of a SavedModel, as its file states them."""

    version: str  #: of TensorFlow; "" if it is not stated
    signatures: tuple[str, ...]  #: of the graph for serving
    code: str  #: what its graph may do beyond computing; "": nothing
    needs_code: str = ""  #: why no request without code around the signature that it chooses can run it


def read_saved_model(stream: BinaryIO, size: int) -> SavedModel | None:
    """Read `saved_model.pb`; None if it has no graph. Raises: MessageError."""
    source = _Source(stream)
    graphs = [_read_meta_graph(source, each) for each in _messages(source, Field(0, start=0, end=size), 2)]
    if not graphs:
        return None
    version = next((graph.version for graph in graphs if graph.version), "")
    signatures = next((graph.signatures for graph in graphs if _SERVE in graph.tags), {})
    needs_code = ""
    with contextlib.suppress(ModelFormatError):  # an ambiguous choice is an error of its own
        needs_code = unusable_tensor(*signatures[choose_signature(signatures, None, "")])
    return SavedModel(version, tuple(signatures), next(filter(None, map(_reach, graphs)), ""), needs_code)


def unusable_tensor(inputs: Types, outputs: Types) -> str:
    """Return the first tensor of a signature that makes it unusable without code, and what to do; "" without one.

    Types are numbers by the names of tensors.
    """
    wrong = [("input", name, number) for name, number in sorted(inputs.items()) if number not in JSON_TYPES]
    if not JSON_TYPES & {*outputs.values()}:
        wrong += [("output", name, number) for name, number in sorted(outputs.items())]
    for side, name, number in wrong:
        return (
            f"has the {side} {name!r} of the type {_OTHER_TYPES.get(number, f'DT_{number}')}, which APIs without code "
            "can't have; write a class with `type: tensorflow`, whose tensorflow_client runs it"
        )
    return ""


def choose_signature(signatures: Iterable[str], configured: str | None, model: str) -> str:
    """Choose the signature to run: the configured one, the only one, or a preferred one, in this order.

    `model` is the label of the model in messages. Raises: ModelFormatError with the available signatures.
    """
    keys = sorted(key for key in signatures if not key.startswith(_INTERNAL_PREFIX))
    shown = ", ".join(map(repr, keys)) or "none"
    if configured is not None:
        if configured in signatures:
            return configured
        raise ModelFormatError(f"signature_key {configured!r} is not a signature of {model}; available: {shown}")
    if len(keys) == 1:
        return keys[0]
    for key in PREFERRED_SIGNATURES:
        if key in keys:
            return key
    if not keys:
        raise ModelFormatError(f"{model} has no signature; export it with `signatures=…`")
    raise ModelFormatError(
        f"{model} has several signatures: {shown}; choose one with signature_key in cortex.yaml, and `type: tensorflow`"
    )


@dataclass(slots=True)
class _Source:
    stream: BinaryIO
    fields_left: int = _MAX_FIELDS


@dataclass(slots=True)
class _Node:
    op: str = ""
    inputs: list[str] = field(default_factory=list)  #: the first name is that of a node or an argument
    functions: set[str] = field(default_factory=set)  #: that its attributes name
    texts: list[bytes] = field(default_factory=list)  #: of tensors in its attributes


@dataclass(slots=True)
class _Function:
    first_argument: str
    nodes: dict[str, _Node]
    is_replaceable: bool  #: the runtime may call it in place of another one that implements the same interface


@dataclass(slots=True)
class _MetaGraph:
    tags: list[str] = field(default_factory=list)
    version: str = ""
    nodes: dict[str, _Node] = field(default_factory=dict)
    functions: dict[str, _Function] = field(default_factory=dict)
    signatures: dict[str, tuple[Types, Types]] = field(default_factory=dict)  #: the types of inputs and outputs
    filename: str = ""  #: the node that receives the path of the checkpoint
    fed: set[str] = field(default_factory=set)  #: nodes whose values callers or the loader replace
    run: set[str] = field(default_factory=set)  #: nodes that calls or the loader ask for


# What a graph can reach.


def _reach(graph: _MetaGraph) -> str:
    """Return what a graph may do beyond computing; "": nothing."""
    bodies: list[Mapping[str, _Node]] = [graph.nodes, *(function.nodes for function in graph.functions.values())]
    operations = {node.op for body in bodies for node in body.values()}
    known = _SAFE | _WRITE | {_RESTORE} | {name for name in graph.functions if not _OPERATION.match(name)}
    if unknown := sorted(operations - known):
        shown = ", ".join(unknown[:_SHOWN_OPERATIONS]) + (", …" if len(unknown) > _SHOWN_OPERATIONS else "")
        return f"its graph has operations that may reach files, the network or other code: {shown}"
    path = _checkpoint_path(graph)
    running = _ancestors(graph.nodes, graph.run)
    savers = {}  # functions of the saver, and whether they write
    for name, function in graph.functions.items():
        ops = {node.op for node in function.nodes.values()} & (_WRITE | {_RESTORE})
        if not ops:
            continue
        savers[name] = bool(ops & _WRITE)
        if function.is_replaceable or not _restores_from(function.nodes, function.first_argument):
            return "its graph reads files that are not its own checkpoint"
    calls = {name for function in graph.functions.values() for node in function.nodes.values() for name in _calls(node)}
    if calls & savers.keys() or not _restores_from(graph.nodes, path):
        return "its graph reads files that are not its own checkpoint"
    for name, node in graph.nodes.items():
        called = _calls(node) & savers.keys()
        if called and node.inputs[:1] != [path]:
            return "its graph reads files that are not its own checkpoint"
        if name in running and (node.op in _WRITE or any(savers[each] for each in called)):
            return "its graph writes files when it is loaded or called"
    return ""


def _checkpoint_path(graph: _MetaGraph) -> str:
    """Return the node that only the loader sets, to the path of the checkpoint; a name that no node has without one."""
    name = graph.filename
    while (node := graph.nodes.get(name)) is not None and name not in graph.fed:
        if node.op == "Placeholder" or (node.op == "Const" and node.texts == [_DEFAULT_CHECKPOINT]):
            return graph.filename
        if node.op not in ("PlaceholderWithDefault", "Identity") or node.inputs[:1] == [name]:
            break
        name = node.inputs[0] if node.inputs else ""
    return "/"


def _restores_from(nodes: Mapping[str, _Node], path: str) -> bool:
    return all(node.inputs[:1] == [path] for node in nodes.values() if node.op == _RESTORE)


def _calls(node: _Node) -> set[str]:
    return {node.op, *node.functions}


def _ancestors(nodes: Mapping[str, _Node], roots: Iterable[str]) -> set[str]:
    """Return the nodes that run when others are asked for, these included."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found and name in nodes:
            found.add(name)
            waiting += nodes[name].inputs
    return found


# Reading.


def _read_meta_graph(source: _Source, message: Field) -> _MetaGraph:
    graph = _MetaGraph()
    for info in _messages(source, message, 1):
        graph.tags += [text(source.stream, each) for each in _messages(source, info, 4)]
        graph.version = _text(source, info, 5)
    for definition in _messages(source, message, 2):
        graph.nodes |= _read_nodes(source, _messages(source, definition, 1), graph.nodes)
        for library in _messages(source, definition, 2):
            for each in _messages(source, library, 1):
                _read_function(source, each, graph.functions)
    savers = list(_messages(source, message, 3))
    if len(savers) > 1:
        raise MessageError("several savers")
    for saver in savers:
        graph.filename = _node_of(_text(source, saver, 1))
        graph.run.add(_node_of(_text(source, saver, 3)))
    for entry in _messages(source, message, 4):
        for collection in _messages(source, entry, 2):
            for names in _messages(source, collection, 1):
                graph.run |= {_node_of(text(source.stream, each)) for each in _messages(source, names, 1)}
    for entry in _messages(source, message, 5):
        signatures = list(_messages(source, entry, 2))
        graph.signatures[_text(source, entry, 1)] = _types(source, signatures, 1), _types(source, signatures, 2)
        for signature in signatures:
            graph.fed |= set(_tensors(source, _messages(source, signature, 1, 2)))
            graph.run |= set(_tensors(source, _messages(source, signature, 2, 2)))
    for asset in _messages(source, message, 6):
        graph.fed |= set(_tensors(source, _messages(source, asset, 1)))
    return graph


def _types(source: _Source, signatures: Iterable[Field], side: int) -> Types:
    """Return the types of the inputs (1) or outputs (2) of `SignatureDef` messages, which parsers merge."""
    types = {}
    for each in signatures:
        for entry in _messages(source, each, side):
            for info in _messages(source, entry, 2):
                numbers = (part.value for part in fields(source.stream, info.start, info.end) if part.number == 2)
                types[_text(source, entry, 1)] = next(numbers, 0)
    return types


def _tensors(source: _Source, infos: Iterable[Field]) -> Iterator[str]:
    """Yield the nodes of `TensorInfo` messages: of tensors, sparse tensors and composite tensors."""
    for info in infos:
        for each in _messages(source, info):
            if each.number == 1:
                yield _node_of(text(source.stream, each))
            elif each.number == 4:
                yield from (_node_of(text(source.stream, name)) for name in _messages(source, each) if name.number <= 3)
            elif each.number == 5:
                yield from _tensors(source, _messages(source, each, 2))


def _read_function(source: _Source, message: Field, functions: dict[str, _Function]) -> None:
    signatures = list(_messages(source, message, 1))
    if len(signatures) != 1:
        raise MessageError("a function without a signature, or with several")
    name = _text(source, signatures[0], 1)
    arguments = [_text(source, each, 1) for each in _messages(source, signatures[0], 2)]
    if name in functions:
        raise MessageError("two functions of one name")
    attributes = {_text(source, entry, 1) for entry in _messages(source, message, 5)}
    functions[name] = _Function(
        arguments[0] if arguments else "",
        _read_nodes(source, _messages(source, message, 3), {}),
        "api_implements" in attributes,
    )


def _read_nodes(source: _Source, messages: Iterable[Field], before: Mapping[str, _Node]) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    for message in messages:
        texts: dict[int, str] = {}
        node = _Node()
        for each in _messages(source, message):
            if each.number in texts:
                raise MessageError(f"field {each.number} of a node is there twice")
            if each.number in (1, 2):  # its name and its operation
                texts[each.number] = text(source.stream, each)
            elif each.number == 3:
                node.inputs.append(_node_of(text(source.stream, each)))
            elif each.number == 5:
                for value in _messages(source, each, 2):
                    if value.end - value.start >= _MIN_FUNCTION_BYTES:
                        _read_attribute(source, value, node)
        name, node.op = texts.get(1, ""), texts.get(2, "")
        if name in nodes or name in before:
            raise MessageError("two nodes of one name")
        nodes[name] = node
    return nodes


def _read_attribute(source: _Source, value: Field, node: _Node, depth: int = 0) -> None:
    """Add the functions that an attribute names, at any depth, and the texts of its tensors."""
    if depth > _MAX_DEPTH:
        raise MessageError("too deeply nested attributes")
    for each in _messages(source, value):
        if each.number == 10:
            _read_function_name(source, each, node, depth)
        elif each.number == 1:
            for function in _messages(source, each, 9):
                _read_function_name(source, function, node, depth)
        elif each.number == 8:
            for content in _messages(source, each, 8):
                source.stream.seek(content.start)
                node.texts.append(source.stream.read(min(content.end - content.start, len(_DEFAULT_CHECKPOINT) + 1)))


def _read_function_name(source: _Source, message: Field, node: _Node, depth: int) -> None:
    node.functions.add(_text(source, message, 1))
    for value in _messages(source, message, 2, 2):
        _read_attribute(source, value, node, depth + 1)


def _messages(source: _Source, message: Field, *numbers: int) -> Iterator[Field]:
    """Yield the messages and texts of a field, of a field of that, and so on; all of them without numbers."""
    for each in fields(source.stream, message.start, message.end):
        source.fields_left -= 1
        if source.fields_left < 0:
            raise MessageError("too many fields")
        if not each.is_bytes or (numbers and each.number != numbers[0]):
            continue
        if len(numbers) > 1:
            yield from _messages(source, each, *numbers[1:])
        else:
            yield each


def _text(source: _Source, message: Field, number: int) -> str:
    """Return the text of a field that a message has at most once; "" without it."""
    found = list(_messages(source, message, number))
    if len(found) > 1:  # parsers take the last one, or the first
        raise MessageError(f"field {number} is there twice")
    return text(source.stream, found[0]) if found else ""


def _node_of(name: str) -> str:
    """Return the node of a tensor or of a control input, such as `^a`, `a:0` or, in functions, `a:output:0`."""
    return name.removeprefix("^").partition(":")[0]


#: Operations of TensorFlow that only compute, or keep values in memory. Those with paths, addresses or code of another
#: language are missing, as are those that models rarely use when they are served.
_SAFE = frozenset(
    """
    Abs Acos Acosh Add AddN AddV2 AdjustContrast AdjustContrastv2 AdjustHue AdjustSaturation All Angle
    AnonymousHashTable AnonymousMutableDenseHashTable AnonymousMutableHashTable Any ApproxTopK ApproximateEqual ArgMax
    ArgMin AsString Asin Asinh Assert Assign AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp
    AssignVariableOp Atan Atan2 Atanh AudioSpectrogram AvgPool AvgPool3D BatchMatMul BatchMatMulV2 BatchMatMulV3
    BatchNormWithGlobalNormalization BatchToSpace BatchToSpaceND Betainc BiasAdd BiasAddV1 Bincount Bitcast BitwiseAnd
    BitwiseOr BitwiseXor BlockLSTM BlockLSTMV2 BroadcastArgs BroadcastGradientArgs BroadcastTo Bucketize Case Cast Ceil
    CheckNumerics Cholesky ClipByValue CombinedNonMaxSuppression Complex Concat ConcatOffset ConcatV2 Conj
    ConjugateTranspose Const ControlTrigger Conv2D Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropInput
    Conv3DBackpropInputV2 Cos Cosh CropAndResize Cross Cumprod Cumsum CumulativeLogsumexp DataFormatDimMap
    DataFormatVecPermute DecodeAndCropJpeg DecodeBase64 DecodeBmp DecodeCSV DecodeCompressed DecodeGif DecodeImage
    DecodeJpeg DecodePaddedRaw DecodePng DecodeRaw DecodeWav DecodeWebP DenseBincount DepthToSpace DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropInput Dequantize Diag DiagPart Digamma Dilation2D DisableCopyOnRead Div DivNoNan
    DrawBoundingBoxes DrawBoundingBoxesV2 DynamicPartition DynamicStitch Eig Einsum Elu Empty EmptyTensorList
    EncodeBase64 EncodeJpeg EncodePng EnsureShape Enter Equal Erf Erfc Erfinv EuclideanNorm Exit Exp ExpandDims Expm1
    ExtractGlimpseV2 ExtractImagePatches FFT FFT2D FFT3D FFTND FakeParam FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
    FakeQuantWithMinMaxVarsPerChannel Fill Fingerprint Floor FloorDiv FloorMod For FusedBatchNorm FusedBatchNormV2
    FusedBatchNormV3 FusedResizeAndPadConv2D GRUBlockCell Gather GatherNd GatherV2 Greater GreaterEqual GuaranteeConst
    HSVToRGB HashTable HashTableV2 IFFT IFFT2D IFFT3D IFFTND IRFFT IRFFT2D IRFFT3D IRFFTND Identity IdentityN If Igamma
    Igammac Imag ImageProjectiveTransformV2 ImageProjectiveTransformV3 InTopK InTopKV2 InitializeTable InitializeTableV2
    Inv Invert InvertPermutation IsFinite IsInf IsNan L2Loss LRN LSTMBlockCell LeakyRelu LeftShift Less LessEqual Lgamma
    LinSpace ListDiff Log Log1p LogMatrixDeterminant LogSoftmax LogicalAnd LogicalNot LogicalOr LookupTableExportV2
    LookupTableFind LookupTableFindV2 LookupTableImport LookupTableImportV2 LookupTableInsert LookupTableInsertV2
    LookupTableRemoveV2 LookupTableSize LookupTableSizeV2 LoopCond LowerBound MapDefun MatMul MatrixBandPart
    MatrixDeterminant MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3
    MatrixInverse MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve MatrixSolveLs MatrixTriangularSolve Max
    MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax Maximum Mean Merge Mfcc Min Minimum MirrorPad Mod Mul MulNoNan
    MutableDenseHashTable MutableDenseHashTableV2 MutableHashTable MutableHashTableOfTensors MutableHashTableOfTensorsV2
    MutableHashTableV2 Ndtri Neg NextAfter NextIteration NoOp NonMaxSuppression NonMaxSuppressionV2 NonMaxSuppressionV3
    NonMaxSuppressionV4 NonMaxSuppressionV5 NotEqual OneHot OnesLike Pack Pad PadV2 ParallelConcat ParallelDynamicStitch
    ParseExample ParseExampleV2 ParseSequenceExample ParseSequenceExampleV2 ParseSingleExample
    ParseSingleSequenceExample ParseTensor PartitionedCall Placeholder PlaceholderV2 PlaceholderWithDefault
    PopulationCount Pow PreventGradient Prod Qr QuantizeAndDequantize QuantizeAndDequantizeV2 QuantizeAndDequantizeV3
    QuantizeAndDequantizeV4 QuantizeDownAndShrinkRange QuantizeV2 QuantizedAdd QuantizedAvgPool QuantizedBiasAdd
    QuantizedConcat QuantizedConv2D QuantizedMatMul QuantizedMaxPool QuantizedRelu QuantizedReshape RFFT RFFT2D RFFT3D
    RFFTND RGBToHSV RaggedBincount RaggedGather RaggedRange RaggedTensorFromVariant RaggedTensorToSparse
    RaggedTensorToTensor RaggedTensorToVariant RandomGamma RandomPoissonV2 RandomShuffle RandomStandardNormal
    RandomUniform RandomUniformInt Range Rank ReadVariableOp Real RealDiv Reciprocal ReduceJoin RegexFullMatch
    RegexReplace Relu Relu6 ReluGrad RequantizationRange Requantize Reshape ResizeArea ResizeBicubic ResizeBilinear
    ResizeNearestNeighbor ResourceGather ResourceGatherNd ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate
    Reverse ReverseSequence ReverseV2 RightShift Rint RngReadAndSkip Roll Round Rsqrt ScaleAndTranslate ScatterAdd
    ScatterNd ScatterNdUpdate ScatterSub ScatterUpdate SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2
    SegmentProd SegmentProdV2 SegmentSum SegmentSumV2 Select SelectV2 SelfAdjointEigV2 Selu SerializeTensor SetSize
    Shape ShapeN ShardedFilename Sigmoid SigmoidGrad Sign Sin Sinh Size Slice Softmax SoftmaxCrossEntropyWithLogits
    Softplus Softsign SpaceToBatch SpaceToBatchND SpaceToDepth SparseAdd SparseBincount SparseConcat SparseCross
    SparseCrossHashed SparseCrossV2 SparseFillEmptyRows SparseMatMul SparseReduceMax SparseReduceSum SparseReorder
    SparseReshape SparseSegmentMean SparseSegmentMeanWithNumSegments SparseSegmentSqrtN
    SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumWithNumSegments SparseSlice SparseSoftmax
    SparseSoftmaxCrossEntropyWithLogits SparseSplit SparseTensorDenseAdd SparseTensorDenseMatMul SparseToDense Split
    SplitV Sqrt Square SquaredDifference Squeeze StatefulPartitionedCall StatefulStandardNormal StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt StatelessCase StatelessIf
    StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomGetAlg
    StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
    StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessShuffle
    StatelessTruncatedNormal StatelessTruncatedNormalV2 StatelessWhile StaticRegexFullMatch StaticRegexReplace
    StopGradient StridedSlice StringFormat StringJoin StringLength StringLower StringNGrams StringSplit StringSplitV2
    StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Sub Substr
    Sum Svd Switch Tan Tanh TanhGrad TensorArray TensorArrayClose TensorArrayCloseV2 TensorArrayCloseV3
    TensorArrayConcat TensorArrayConcatV2 TensorArrayConcatV3 TensorArrayGather TensorArrayGatherV2 TensorArrayGatherV3
    TensorArrayRead TensorArrayReadV2 TensorArrayReadV3 TensorArrayScatter TensorArrayScatterV2 TensorArrayScatterV3
    TensorArraySize TensorArraySizeV2 TensorArraySizeV3 TensorArraySplit TensorArraySplitV2 TensorArraySplitV3
    TensorArrayV2 TensorArrayV3 TensorArrayWrite TensorArrayWriteV2 TensorArrayWriteV3 TensorListConcat
    TensorListConcatLists TensorListConcatV2 TensorListElementShape TensorListFromTensor TensorListGather
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack TensorListPushBackBatch TensorListReserve
    TensorListResize TensorListScatter TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack
    TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate Tile ToBool TopK TopKV2
    Transpose TridiagonalSolve TruncateDiv TruncateMod TruncatedNormal UnicodeDecode UnicodeDecodeWithOffsets
    UnicodeEncode UnicodeScript UnicodeTranscode Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Unpack UnravelIndex
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum UpperBound VarHandleOp
    VarIsInitializedOp Variable VariableShape VariableV2 Where While Xdivy Xlog1py Xlogy ZerosLike Zeta
    """.split()  # noqa: SIM905 - a list would have as many lines as names
)
