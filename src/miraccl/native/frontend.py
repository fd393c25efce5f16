"""Translation of kernel sources to LLVM IR: the subset of Python that kernels over int64 need.

Numba infers types, which for functions whose every value is an int64 is wasted: it took 26 s for
the CPU engine, of which LLVM needed two. Here each function is parsed once, becomes one LLVM
function, and a whole kernel source is optimised as one module.

The language: functions of positional int64 arguments that return an int64, a bool or a tuple of
them; assignments to local variables (tuples are unpacked at once); ``if``, ``while``,
``for ... in range(...)``, ``break``, ``continue``, ``return``; integer arithmetic that wraps,
with Python's ``//`` and ``%`` (0 for a zero divisor); comparisons, ``and``, ``or``, ``not``,
conditional expressions, ``min`` and ``max``; calls of other such functions, of intrinsics and of C
functions (``native.intrinsics``). ``a[i]`` is the word at address ``a + 8 * i``, and ``r.field`` of
an argument annotated with a dataclass the word at the field's position, so that pure functions
over sequences and records are kernel sources as well. Other names are constants of the module or
the closure.
Everything else raises ``UnsupportedSyntax`` with the line.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from llvmlite import ir

_WORD, _BOOL, _VOID = ir.IntType(64), ir.IntType(1), ir.VoidType()
_ARITHMETIC = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "shl",
    ast.RShift: "ashr",
}
_COMPARISONS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


class UnsupportedSyntax(TypeError):
    """A construct of a kernel source that the compiler does not translate."""


def translate(exports: Mapping[str, Any], prefix: str, triple: str, data_layout: str) -> str:
    """Return the text of an LLVM module with a C function ``prefix + name`` for each export."""
    module = _Module(triple, data_layout)
    for name, function in exports.items():
        module.define(_python_function(function), prefix + name)
    module.define_pending()
    return str(module.ir)


def _python_function(function: Any) -> Any:
    return getattr(function, "py_func", function)


@functools.cache
def _parsed_file(path: str) -> dict[int, ast.FunctionDef]:
    """Return the functions of a source file by the line of their code objects."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    return {
        node.decorator_list[0].lineno if node.decorator_list else node.lineno: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def _parse(function: Any) -> ast.FunctionDef:
    code = function.__code__
    path = inspect.getsourcefile(function) or code.co_filename
    node = _parsed_file(path).get(code.co_firstlineno)
    if node is None or node.name != code.co_name:
        raise UnsupportedSyntax(
            f"cannot compile {function.__qualname__}: {path}:{code.co_firstlineno} defines no "
            "such function"
        )
    return node


def _returned(node: ast.FunctionDef) -> list[ast.expr]:
    found = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
    return [value for value in found if value is not None]


class _Module:
    """The LLVM module of one kernel source; a function is added when it is first called."""

    def __init__(self, triple: str, data_layout: str) -> None:
        self.ir = ir.Module()
        self.ir.triple, self.ir.data_layout = triple, data_layout
        self._functions: dict[Any, ir.Function] = {}
        self._pending: list[tuple[Any, ir.Function]] = []

    def define(self, function: Any, symbol: str) -> None:
        """Add an exported function."""
        self._pending.append((function, self._declare(function, symbol)))

    def define_pending(self) -> None:
        """Translate the bodies of all functions that were declared or called."""
        while self._pending:
            function, target = self._pending.pop()
            _Function(self, function, target).translate()

    def function(self, function: Any) -> ir.Function:
        """Return the LLVM function of a helper."""
        if function not in self._functions:
            name = f"{function.__module__}.{function.__qualname__}.{len(self._functions)}"
            made = self._declare(function, name)
            made.linkage = "internal"
            self._functions[function] = made
            self._pending.append((function, made))
        return self._functions[function]

    def _declare(self, function: Any, symbol: str) -> ir.Function:
        count = self.results(function)
        result = _WORD if count == 1 else ir.LiteralStructType([_WORD] * count)
        made = ir.Function(
            self.ir, ir.FunctionType(result, [_WORD] * function.__code__.co_argcount), symbol
        )
        made.attributes.add("nounwind")
        return made

    def results(self, function: Any) -> int:
        """Return the number of values that a function returns; 1 also for one without a value."""
        for value in _returned(_parse(function)):
            if isinstance(value, ast.Tuple):
                return len(value.elts)
            if isinstance(value, ast.Call):
                called = _python_function(_resolve(function, value.func))
                if inspect.isfunction(called) and called is not function:
                    return self.results(called)
            return 1
        return 1

    def external(self, symbol: str, kind: ir.FunctionType) -> ir.Function:
        """Return the declaration of a C function."""
        declared = self.ir.globals.get(symbol)
        return declared if declared is not None else ir.Function(self.ir, kind, symbol)


def _resolve(function: Any, node: ast.expr) -> Any:
    """Return the object that a name or ``module.name`` stands for in a function."""
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(function, node.value), node.attr)
    if not isinstance(node, ast.Name):
        raise UnsupportedSyntax(f"cannot resolve {ast.unparse(node)!r}")
    names = function.__code__.co_freevars
    if node.id in names:
        return function.__closure__[names.index(node.id)].cell_contents
    if node.id in function.__globals__:
        return function.__globals__[node.id]
    return getattr(builtins, node.id)


class _CodegenContext:
    """The part of Numba's code generation context that intrinsics use."""

    @staticmethod
    def get_dummy_value() -> ir.Constant:
        return ir.Constant(_WORD, 0)


class _Function:
    """Translation of one function."""

    def __init__(self, module: _Module, function: Any, target: ir.Function) -> None:
        self._module, self._function, self._target = module, function, target
        self._node = _parse(function)
        self._entry = ir.IRBuilder(target.append_basic_block("entry"))
        self._builder = ir.IRBuilder(target.append_basic_block("body"))
        self._variables: dict[str, ir.AllocaInstr] = {}
        self._loops: list[tuple[ir.Block, ir.Block]] = []  # targets of continue and break
        self._fields: dict[str, list[str]] = {}

    def translate(self) -> None:
        arguments = self._node.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            raise self._unsupported(self._node, "only positional arguments without defaults")
        body = self._builder.block
        for node in ast.walk(self._node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._variable(node.id)
        for argument, value in zip(arguments.args, self._target.args, strict=True):
            self._entry.store(value, self._variable(argument.arg))
            self._fields[argument.arg] = self._fields_of(argument)
        self._statements(self._node.body)
        if not self._builder.block.is_terminated:
            self._builder.ret(ir.Constant(self._target.function_type.return_type, None))
        self._entry.branch(body)

    def _fields_of(self, argument: ast.arg) -> list[str]:
        """Return the names of an argument's fields, if its annotation is a dataclass."""
        if not isinstance(argument.annotation, ast.Name):
            return []
        kind = self._function.__globals__.get(argument.annotation.id)
        return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []

    def _unsupported(self, node: Any, reason: str) -> UnsupportedSyntax:
        code = self._function.__code__
        line = getattr(node, "lineno", code.co_firstlineno)
        return UnsupportedSyntax(
            f"cannot compile {code.co_filename}:{line} ({code.co_name}): {reason}"
        )

    def _variable(self, name: str) -> ir.AllocaInstr:
        if name not in self._variables:
            self._variables[name] = self._entry.alloca(_WORD, name=name)
            self._entry.store(ir.Constant(_WORD, 0), self._variables[name])
        return self._variables[name]

    # ---- statements

    def _statements(self, body: list[ast.stmt]) -> None:
        for node in body:
            if self._builder.block.is_terminated:
                return  # unreachable
            if type(node) not in self._STATEMENTS:
                raise self._unsupported(node, f"{type(node).__name__} statements")
            self._STATEMENTS[type(node)](self, node)

    def _pass(self, node: ast.Pass) -> None:
        pass

    def _expression(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._values(node.value)

    def _assign(self, node: ast.Assign) -> None:
        values = self._values(node.value)
        for target in node.targets:
            self._store(target, values)

    def _annotated_assign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._store(node.target, self._values(node.value))

    def _store(self, target: ast.expr, values: list[Any]) -> None:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if len(names) != len(values):
            raise self._unsupported(target, f"{len(values)} values for {len(names)} variables")
        for name, value in zip(names, values, strict=True):
            if isinstance(name, ast.Subscript):
                self._builder.store(self._as_word(value), self._element(name))
            elif isinstance(name, ast.Name):
                self._builder.store(self._as_word(value), self._variable(name.id))
            else:
                raise self._unsupported(target, "only assignments to local variables and words")

    def _augmented_assign(self, node: ast.AugAssign) -> None:
        variable: Any
        if isinstance(node.target, ast.Subscript):
            variable = self._element(node.target)
        elif isinstance(node.target, ast.Name):
            variable = self._variable(node.target.id)
        else:
            raise self._unsupported(node, "only assignments to local variables and words")
        value = self._operate(node, node.op, self._builder.load(variable), self._word(node.value))
        self._builder.store(value, variable)

    def _return(self, node: ast.Return) -> None:
        kind = self._target.function_type.return_type
        if node.value is None:
            self._builder.ret(ir.Constant(kind, None))
            return
        values = [self._as_word(value) for value in self._values(node.value)]
        if isinstance(kind, ir.LiteralStructType):
            if len(values) != len(kind.elements):
                raise self._unsupported(node, "another number of results than elsewhere")
            result: Any = ir.Constant(kind, ir.Undefined)
            for index, value in enumerate(values):
                result = self._builder.insert_value(result, value, index)
            self._builder.ret(result)
        elif len(values) == 1:
            self._builder.ret(values[0])
        else:
            raise self._unsupported(node, "another number of results than elsewhere")

    def _if(self, node: ast.If) -> None:
        then, after = self._block("then"), self._block("endif")
        otherwise = self._block("else") if node.orelse else after
        self._branch_if(node.test, then, otherwise)
        for block, body in ((then, node.body), (otherwise, node.orelse)):
            if block is not after:
                self._builder.position_at_end(block)
                self._statements(body)
                self._branch_to(after)
        self._builder.position_at_end(after)

    def _while(self, node: ast.While) -> None:
        if node.orelse:
            raise self._unsupported(node, "else of a loop")
        test, body, after = self._block("while"), self._block("do"), self._block("endwhile")
        self._builder.branch(test)
        self._builder.position_at_end(test)
        self._branch_if(node.test, body, after)
        self._loop_body(node.body, body, test, after)
        self._builder.position_at_end(after)

    def _for(self, node: ast.For) -> None:
        call = node.iter
        if (
            node.orelse
            or not isinstance(node.target, ast.Name)
            or not isinstance(call, ast.Call)
            or _resolve(self._function, call.func) is not range
        ):
            raise self._unsupported(node, "loops other than over range()")
        bounds = [self._word(each) for each in call.args]
        start = bounds[0] if len(bounds) > 1 else ir.Constant(_WORD, 0)
        stop = bounds[min(1, len(bounds) - 1)]
        step = bounds[2] if len(bounds) > 2 else ir.Constant(_WORD, 1)
        counter = self._entry.alloca(_WORD)
        test, body = self._block("for"), self._block("do")
        advance, after = self._block("next"), self._block("endfor")
        self._builder.store(start, counter)
        self._builder.branch(test)
        self._builder.position_at_end(test)
        self._builder.cbranch(self._in_range(self._builder.load(counter), stop, step), body, after)
        self._builder.position_at_end(body)
        self._builder.store(self._builder.load(counter), self._variable(node.target.id))
        self._loop_body(node.body, body, advance, after)
        self._builder.position_at_end(advance)
        # A step of one cannot pass `stop`, so the counter does not wrap around.
        flags = ("nsw",) if isinstance(step, ir.Constant) and step.constant == 1 else ()
        value = self._builder.add(self._builder.load(counter), step, flags=flags)
        self._builder.store(value, counter)
        self._builder.branch(test)
        self._builder.position_at_end(after)

    def _in_range(self, value: Any, stop: Any, step: Any) -> Any:
        """Return the bit that ``range`` has not ended; a step of 0 ends it at once."""
        builder, zero = self._builder, ir.Constant(_WORD, 0)
        below = builder.icmp_signed("<", value, stop)
        above = builder.icmp_signed(">", value, stop)
        if isinstance(step, ir.Constant) and step.constant != 0:
            return below if step.constant > 0 else above
        rises, falls = builder.icmp_signed(">", step, zero), builder.icmp_signed("<", step, zero)
        return builder.or_(builder.and_(rises, below), builder.and_(falls, above))

    def _loop_body(
        self, statements: list[ast.stmt], body: ir.Block, again: ir.Block, after: ir.Block
    ) -> None:
        self._builder.position_at_end(body)
        self._loops.append((again, after))
        self._statements(statements)
        self._loops.pop()
        self._branch_to(again)

    def _break(self, node: ast.Break) -> None:
        self._builder.branch(self._loops[-1][1])

    def _continue(self, node: ast.Continue) -> None:
        self._builder.branch(self._loops[-1][0])

    def _block(self, name: str) -> ir.Block:
        return self._target.append_basic_block(name)

    def _branch_to(self, block: ir.Block) -> None:
        if not self._builder.block.is_terminated:
            self._builder.branch(block)

    def _branch_if(self, test: ast.expr, then: ir.Block, otherwise: ir.Block) -> None:
        """Branch on a condition; ``and``, ``or`` and ``not`` become branches of their own."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._branch_if(test.operand, otherwise, then)
        elif isinstance(test, ast.BoolOp):
            both = isinstance(test.op, ast.And)
            for operand in test.values[:-1]:
                following = self._block("and" if both else "or")
                self._branch_if(
                    operand, following if both else then, otherwise if both else following
                )
                self._builder.position_at_end(following)
            self._branch_if(test.values[-1], then, otherwise)
        else:
            self._builder.cbranch(self._as_bool(self._value(test)), then, otherwise)

    # ---- expressions: values are words or, for conditions, bits

    def _as_word(self, value: Any) -> Any:
        return self._builder.zext(value, _WORD) if value.type == _BOOL else value

    def _as_bool(self, value: Any) -> Any:
        if value.type == _BOOL:
            return value
        return self._builder.icmp_signed("!=", value, ir.Constant(_WORD, 0))

    def _word(self, node: ast.expr) -> Any:
        return self._as_word(self._value(node))

    def _value(self, node: ast.expr) -> Any:
        values = self._values(node)
        if len(values) != 1:
            raise self._unsupported(node, "a tuple within an expression")
        return values[0]

    def _values(self, node: ast.expr) -> list[Any]:
        """Translate an expression; several values for a tuple, or a call that returns one."""
        if isinstance(node, ast.Tuple):
            return [self._value(each) for each in node.elts]
        if isinstance(node, ast.Call):
            return self._call(node)
        if type(node) not in self._EXPRESSIONS:
            raise self._unsupported(node, f"{type(node).__name__} expressions")
        return [self._EXPRESSIONS[type(node)](self, node)]

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._variables:
            return self._builder.load(self._variables[node.id])
        return self._constant(node, _resolve(self._function, node))

    def _element(self, node: ast.Subscript) -> Any:
        """Return the pointer to ``a[i]``."""
        offset = self._builder.mul(self._word(node.slice), ir.Constant(_WORD, 8))
        address = self._builder.add(self._word(node.value), offset)
        return self._builder.inttoptr(address, _WORD.as_pointer())

    def _subscript(self, node: ast.Subscript) -> Any:
        return self._builder.load(self._element(node))

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in self._fields:
            fields = self._fields[node.value.id]
            if node.attr not in fields:
                raise self._unsupported(node, f"{ast.unparse(node)} is not a field")
            address = self._builder.add(
                self._word(node.value), ir.Constant(_WORD, 8 * fields.index(node.attr))
            )
            return self._builder.load(self._builder.inttoptr(address, _WORD.as_pointer()))
        return self._constant(node, _resolve(self._function, node))

    def _literal(self, node: ast.Constant) -> Any:
        return self._constant(node, node.value)

    def _constant(self, node: ast.expr, value: object) -> ir.Constant:
        if isinstance(value, bool):
            return ir.Constant(_BOOL, int(value))
        if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
            raise self._unsupported(node, f"{ast.unparse(node)} = {value!r} is not an int64")
        return ir.Constant(_WORD, int(value))

    def _binary(self, node: ast.BinOp) -> Any:
        return self._operate(node, node.op, self._word(node.left), self._word(node.right))

    def _operate(self, node: Any, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.FloorDiv | ast.Mod):
            quotient, rest = self._divide(left, right)
            return quotient if isinstance(op, ast.FloorDiv) else rest
        if type(op) not in _ARITHMETIC:
            raise self._unsupported(node, f"operator {type(op).__name__}")
        if isinstance(left, ir.Constant) and isinstance(right, ir.Constant):
            folded = _fold(op, left.constant, right.constant)
            if folded is not None:
                return ir.Constant(_WORD, folded)
        return getattr(self._builder, _ARITHMETIC[type(op)])(left, right)

    def _divide(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Return (quotient rounded down, rest with the sign of the divisor); zeros for a zero."""
        builder, zero, one = self._builder, ir.Constant(_WORD, 0), ir.Constant(_WORD, 1)
        is_constant = isinstance(right, ir.Constant) and right.constant not in (0, -1)
        by_zero = by_minus_one = None
        divisor = right
        if not is_constant:  # both would trap, the second one for the smallest int64
            by_zero = builder.icmp_signed("==", right, zero)
            by_minus_one = builder.icmp_signed("==", right, ir.Constant(_WORD, -1))
            divisor = builder.select(builder.or_(by_zero, by_minus_one), one, right)
        quotient, rest = builder.sdiv(left, divisor), builder.srem(left, divisor)
        differ = builder.icmp_signed("<", builder.xor(rest, divisor), zero)
        rounds = builder.and_(builder.icmp_signed("!=", rest, zero), differ)
        quotient = builder.select(rounds, builder.sub(quotient, one), quotient)
        rest = builder.select(rounds, builder.add(rest, divisor), rest)
        if not is_constant:
            quotient = builder.select(by_minus_one, builder.neg(left), quotient)
            quotient = builder.select(by_zero, zero, quotient)
        return quotient, rest  # the rest by 1, the replaced divisor, is 0

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return self._builder.not_(self._as_bool(value))
        value = self._as_word(value)
        if isinstance(value, ir.Constant) and isinstance(node.op, ast.USub):
            return ir.Constant(_WORD, -value.constant)
        if isinstance(node.op, ast.USub):
            return self._builder.neg(value)
        return self._builder.not_(value) if isinstance(node.op, ast.Invert) else value

    def _compare(self, node: ast.Compare) -> Any:
        """Translate a comparison; the later operands of a chain are evaluated in any case."""
        result, left = None, self._word(node.left)
        for op, operand in zip(node.ops, node.comparators, strict=True):
            if type(op) not in _COMPARISONS:
                raise self._unsupported(node, f"operator {type(op).__name__}")
            right = self._word(operand)
            holds = self._builder.icmp_signed(_COMPARISONS[type(op)], left, right)
            result = holds if result is None else self._builder.and_(result, holds)
            left = right
        return result

    def _bool(self, node: ast.BoolOp) -> Any:
        """Translate ``and`` and ``or``: the value of the operand that decides."""
        both, after = isinstance(node.op, ast.And), self._block("decided")
        variable = self._entry.alloca(_WORD)
        is_bool = True
        for index, operand in enumerate(node.values):
            value = self._value(operand)
            is_bool = is_bool and value.type == _BOOL
            self._builder.store(self._as_word(value), variable)
            if index + 1 == len(node.values):
                self._builder.branch(after)
            else:
                following = self._block("operand")
                blocks = (following, after) if both else (after, following)
                self._builder.cbranch(self._as_bool(value), *blocks)
                self._builder.position_at_end(following)
        self._builder.position_at_end(after)
        result = self._builder.load(variable)
        return self._builder.trunc(result, _BOOL) if is_bool else result

    def _conditional(self, node: ast.IfExp) -> Any:
        then, otherwise, after = self._block("then"), self._block("else"), self._block("endif")
        variable = self._entry.alloca(_WORD)
        self._branch_if(node.test, then, otherwise)
        is_bool = True
        for block, value_node in ((then, node.body), (otherwise, node.orelse)):
            self._builder.position_at_end(block)
            value = self._value(value_node)
            is_bool = is_bool and value.type == _BOOL
            self._builder.store(self._as_word(value), variable)
            self._builder.branch(after)
        self._builder.position_at_end(after)
        result = self._builder.load(variable)
        return self._builder.trunc(result, _BOOL) if is_bool else result

    # ---- calls

    def _call(self, node: ast.Call) -> list[Any]:
        if node.keywords:
            raise self._unsupported(node, "only positional arguments")
        called = _resolve(self._function, node.func)
        if called is min or called is max:
            return [self._extreme(node, "<" if called is min else ">")]
        arguments = [self._word(each) for each in node.args]
        function = _python_function(called)
        if inspect.isfunction(function):
            return self._call_function(node, function, arguments)
        if hasattr(called, "_defn"):
            return [self._call_intrinsic(called, arguments)]
        if hasattr(called, "symbol"):
            return [self._call_external(called, arguments)]
        if hasattr(called, "bitwidth") and len(arguments) == 1:
            return [self._converted(arguments[0], ir.IntType(called.bitwidth))]
        raise self._unsupported(node, f"calls of {ast.unparse(node.func)}")

    def _call_function(self, node: ast.Call, function: Any, arguments: list[Any]) -> list[Any]:
        target = self._module.function(function)
        if len(arguments) != len(target.args):
            raise self._unsupported(node, f"{len(arguments)} arguments, {len(target.args)} wanted")
        result = self._builder.call(target, arguments)
        kind = target.function_type.return_type
        if not isinstance(kind, ir.LiteralStructType):
            return [result]
        return [self._builder.extract_value(result, i) for i in range(len(kind.elements))]

    def _extreme(self, node: ast.Call, order: str) -> Any:
        best, *others = [self._word(each) for each in node.args]
        for value in others:
            best = self._builder.select(self._builder.icmp_signed(order, value, best), value, best)
        return best

    def _call_intrinsic(self, called: Any, arguments: list[Any]) -> Any:
        signature, emit = called._defn(None, *([None] * len(arguments)))
        kinds = [_llvm_type(each) for each in signature.args]
        converted = [
            value if kind == _WORD else self._builder.trunc(value, kind)
            for value, kind in zip(arguments, kinds, strict=True)
        ]
        return emit(_CodegenContext, self._builder, signature, converted)

    def _call_external(self, called: Any, arguments: list[Any]) -> Any:
        kind = ir.FunctionType(
            _llvm_type(called.sig.return_type), [_llvm_type(each) for each in called.sig.args]
        )
        converted = [
            value if wanted == _WORD else self._builder.trunc(value, wanted)
            for value, wanted in zip(arguments, kind.args, strict=True)
        ]
        result = self._builder.call(self._module.external(called.symbol, kind), converted)
        if kind.return_type == _VOID:
            return ir.Constant(_WORD, 0)
        return result if result.type == _WORD else self._builder.sext(result, _WORD)

    def _converted(self, value: Any, kind: ir.IntType) -> Any:
        if kind == _WORD:
            return value
        return self._builder.sext(self._builder.trunc(value, kind), _WORD)

    _STATEMENTS: ClassVar[dict[type, Callable[..., None]]] = {
        ast.Pass: _pass,
        ast.Expr: _expression,
        ast.Assign: _assign,
        ast.AnnAssign: _annotated_assign,
        ast.AugAssign: _augmented_assign,
        ast.Return: _return,
        ast.If: _if,
        ast.While: _while,
        ast.For: _for,
        ast.Break: _break,
        ast.Continue: _continue,
    }
    _EXPRESSIONS: ClassVar[dict[type, Callable[..., Any]]] = {
        ast.Name: _name,
        ast.Subscript: _subscript,
        ast.Attribute: _attribute,
        ast.Constant: _literal,
        ast.BinOp: _binary,
        ast.UnaryOp: _unary,
        ast.Compare: _compare,
        ast.BoolOp: _bool,
        ast.IfExp: _conditional,
    }


def _llvm_type(kind: Any) -> Any:
    """Return the LLVM type of a Numba type; intrinsics take and return words, C functions ints."""
    bits = getattr(kind, "bitwidth", None)
    return _VOID if bits is None else ir.IntType(bits)


def _fold(op: ast.operator, left: int, right: int) -> int | None:
    """Return the value of an operation on constants; None where it does not fit an int64."""
    operations: dict[type, Callable[[int, int], int]] = {
        ast.Add: int.__add__,
        ast.Sub: int.__sub__,
        ast.Mult: int.__mul__,
    }
    made = operations[type(op)](left, right) if type(op) in operations else None
    return made if made is not None and -(1 << 63) <= made < 1 << 63 else None
