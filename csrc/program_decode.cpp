#include "program_decode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "checks.h"
#include "linear.h"

namespace plait {
namespace {

constexpr const char* kOp = "program";
constexpr int64_t kMostColumns = int64_t{1} << 24;  // of a register; no product here overflows

ValueType value_type(Element type) {
  return type == Element::kFloat32 ? ValueType::kFloat32 : ValueType::kBfloat16;
}

size_t value_size(ValueType type) {
  switch (type) {
    case ValueType::kFloat32:
    case ValueType::kInt32:
      return 4;
    case ValueType::kBfloat16:
      return 2;
    case ValueType::kInt64:
      return 8;
    case ValueType::kUint8:
    case ValueType::kOther:
      break;
  }
  return 1;
}

// The fields of one instruction, read in order, and what they must be.
class Fields {
 public:
  Fields(const EncodedProgram& encoded, Program& program, std::vector<bool>& is_written,
         std::string place)
      : encoded_(encoded), program_(program), is_written_(is_written), place_(std::move(place)) {}

  void point_at(const int64_t* begin, const int64_t* end) {
    at_ = begin;
    end_ = end;
  }
  void check_all_read() const { expect(at_ == end_, "has ", end_ - at_, " fields too many"); }

  template <class... Parts>
  void expect(bool holds, const Parts&... parts) const {
    check(holds, kOp, place_, " ", parts...);
  }

  int64_t integer() {
    expect(at_ != end_, "has too few fields");
    return *at_++;
  }
  int64_t integer(int64_t low, int64_t high, const char* what) {
    const int64_t value = integer();
    expect(value >= low && value <= high, "has ", what, " ", value, ", not ", low, " to ", high);
    return value;
  }
  bool flag() { return integer(0, 1, "flag") == 1; }
  double real(const char* what) {
    const auto value = std::bit_cast<double>(integer());
    expect(std::isfinite(value), "has ", what, " ", value);
    return value;
  }
  float eps() {
    const double value = real("eps");
    expect(value >= 0, "has eps ", value);
    return static_cast<float>(value);
  }

  size_t source() {
    const size_t reg = any_register();
    expect(is_written_[reg], "reads register ", reg, ", which nothing has written");
    return reg;
  }
  size_t target() {
    const size_t reg = any_register();
    targets_.push_back(reg);
    return reg;
  }
  size_t changed() { return source(); }
  void mark_written() {
    for (const size_t reg : targets_) is_written_[reg] = true;
  }
  size_t width(size_t reg) const { return program_.widths[reg]; }

  Columns columns() {
    Columns c{};
    c.reg = source();
    c.start = static_cast<size_t>(integer(0, kMostColumns, "a first column"));
    c.num_heads = static_cast<size_t>(integer(1, kMostColumns, "heads"));
    c.head_size = static_cast<size_t>(integer(1, kMostColumns, "a head size"));
    c.stride = static_cast<size_t>(
        integer(static_cast<int64_t>(c.head_size), kMostColumns, "columns from head to head"));
    expect(c.start + c.width() <= width(c.reg), "takes columns ", c.start, " to ",
           c.start + c.width(), " of register ", c.reg, ", which has ", width(c.reg));
    return c;
  }

  // Or null, where that is allowed.
  const TensorView* tensor(const char* what, bool is_optional = false) {
    const int64_t index = integer();
    if (index < 0 && is_optional) return nullptr;
    expect(index >= 0 && static_cast<size_t>(index) < encoded_.tensors.size(), "has no ", what);
    const TensorView& found = encoded_.tensors[static_cast<size_t>(index)];
    expect(reinterpret_cast<uintptr_t>(found.data) % value_size(found.type) == 0, "has ", what,
           " at an odd address");
    return &found;
  }
  Vector vector(const char* what, size_t size, bool is_optional = false) {
    const TensorView* found = tensor(what, is_optional);
    if (found == nullptr) return {};
    expect(found->type == ValueType::kFloat32 || found->type == ValueType::kBfloat16, "has ", what,
           " that is neither float32 nor bfloat16");
    expect_sizes(*found, {static_cast<int64_t>(size)}, what);
    return {found->data,
            found->type == ValueType::kFloat32 ? Element::kFloat32 : Element::kBfloat16};
  }
  void expect_type(const TensorView& t, ValueType type, const char* what) const {
    expect(t.type == type, "has ", what, " of another dtype than it must have");
  }
  void expect_sizes(const TensorView& t, const std::vector<int64_t>& sizes,
                    const char* what) const {
    expect(t.sizes == sizes, "has ", what, " of shape ", text(t.sizes), ", not ", text(sizes));
  }
  Activation activation() {
    return static_cast<Activation>(
        integer(0, static_cast<int64_t>(Activation::kQuickGelu), "activation"));
  }
  Element type() const { return program_.type; }
  Program& program() { return program_; }

 private:
  static std::string text(const std::vector<int64_t>& sizes) {
    std::string result = "[";
    for (size_t i = 0; i < sizes.size(); ++i) {
      result += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
    }
    return result + "]";
  }
  size_t any_register() {
    return static_cast<size_t>(
        integer(0, static_cast<int64_t>(program_.widths.size()) - 1, "register"));
  }

  const EncodedProgram& encoded_;
  Program& program_;
  std::vector<bool>& is_written_;
  std::string place_;
  std::vector<size_t> targets_;
  const int64_t* at_ = nullptr;
  const int64_t* end_ = nullptr;
};

// --- one function for each kind
// -------------------------------------------------------------------

void expect_linear(Fields& f, size_t input, size_t output, size_t inputs, size_t outputs) {
  f.expect(input != output, "writes the register that it reads");
  f.expect(f.width(input) == inputs, "takes ", inputs, " inputs, register ", input, " has ",
           f.width(input));
  f.expect(f.width(output) == outputs, "gives ", outputs, " outputs, register ", output, " has ",
           f.width(output));
}

Operation read_linear(Fields& f) {
  LinearOp op{};
  op.input = f.source();
  op.output = f.target();
  const TensorView& tiles = *f.tensor("weight");
  op.in_features = static_cast<size_t>(f.integer(1, kMostColumns, "inputs"));
  op.out_features = static_cast<size_t>(f.integer(1, kMostColumns, "outputs"));
  op.bias = f.vector("bias", op.out_features, true);
  op.leaf = f.integer(-1, std::numeric_limits<int32_t>::max(), "leaf");
  expect_linear(f, op.input, op.output, op.in_features, op.out_features);
  const size_t per_step = f.type() == Element::kFloat32 ? 1 : 2;
  const size_t num_tiles = (op.out_features + kTileOutputs - 1) / kTileOutputs;
  const size_t steps = (op.in_features + per_step - 1) / per_step;
  f.expect_type(tiles, value_type(f.type()), "weight");
  f.expect_sizes(tiles,
                 {static_cast<int64_t>(num_tiles), static_cast<int64_t>(steps),
                  static_cast<int64_t>(kTileOutputs * per_step)},
                 "weight");
  op.weight = tiles.data;
  op.weight_bytes = num_tiles * steps * kStepBytes;
  return op;
}

Operation read_quantized_linear(Fields& f) {
  QuantizedLinearOp op{};
  QuantizedWeight& weight = op.weight;
  op.input = f.source();
  op.output = f.target();
  const TensorView& blob = *f.tensor("weight");
  weight.in_features = static_cast<size_t>(f.integer(1, kMostColumns, "inputs"));
  weight.out_features = static_cast<size_t>(f.integer(1, kMostColumns, "outputs"));
  const int64_t bits = f.integer(4, 8, "bits");
  const int64_t group = f.integer(0, 128, "a group of");
  const int64_t scales = f.integer(0, 2, "scales of type");
  const int64_t zero_point = f.integer(-1, bits == 4 ? kMostPairZeroPoint : 255, "zero point");
  weight.exact = f.flag();
  op.bias = f.vector("bias", weight.out_features, true);
  op.leaf = f.integer(-1, std::numeric_limits<int32_t>::max(), "leaf");
  f.expect(bits == 4 || bits == 8, "has ", bits, " bits");
  f.expect(group == 0 || group == 16 || group == 32 || group == 64 || group == 128,
           "has groups of ", group);
  weight.bits = static_cast<int>(bits);
  weight.group = static_cast<size_t>(group);
  f.expect(scales != 2 || group != 0, "has scales of two levels without groups");
  weight.scales = static_cast<ScaleType>(scales);
  weight.has_mins = zero_point < 0;
  weight.zero_point = weight.has_mins ? 0 : static_cast<int>(zero_point);
  expect_linear(f, op.input, op.output, weight.in_features, weight.out_features);
  f.expect_type(blob, ValueType::kUint8, "weight");
  f.expect_sizes(blob, {static_cast<int64_t>(weight.tiles() * weight.tile_bytes())}, "weight");
  weight.blob = static_cast<const uint8_t*>(blob.data);
  return op;
}

void expect_equal_widths(Fields& f, size_t a, size_t b) {
  f.expect(f.width(a) == f.width(b), "takes registers of ", f.width(a), " and ", f.width(b),
           " columns, which must be equal");
}

Operation read_rms_norm(Fields& f) {
  RmsNormOp op{};
  op.input = f.source();
  op.output = f.target();
  expect_equal_widths(f, op.input, op.output);
  op.weight = f.vector("weight", f.width(op.input));
  op.eps = f.eps();
  op.weight_offset = static_cast<float>(f.real("weight offset"));
  op.round_first = f.flag();
  return op;
}

Operation read_layer_norm(Fields& f) {
  LayerNormOp op{};
  op.input = f.source();
  op.output = f.target();
  expect_equal_widths(f, op.input, op.output);
  op.weight = f.vector("weight", f.width(op.input), true);
  op.bias = f.vector("bias", f.width(op.input), true);
  op.eps = f.eps();
  return op;
}

Operation read_head_norm(Fields& f) {
  HeadNormOp op{};
  op.heads = f.columns();
  f.expect(op.heads.stride == op.heads.head_size, "norms heads of ", op.heads.head_size,
           " that lie ", op.heads.stride, " apart");
  op.weight = f.vector("weight", op.heads.head_size);
  op.eps = f.eps();
  op.weight_offset = static_cast<float>(f.real("weight offset"));
  op.round_first = f.flag();
  return op;
}

size_t table_number(Program& program, const RopeTable& table) {
  const auto is_same = [&](const RopeTable& other) {
    return other.cos == table.cos && other.sin == table.sin && other.axes == table.axes;
  };
  const auto found = std::find_if(program.tables.begin(), program.tables.end(), is_same);
  if (found != program.tables.end()) return static_cast<size_t>(found - program.tables.begin());
  program.tables.push_back(table);
  return program.tables.size() - 1;
}

Operation read_rope(Fields& f) {
  RopeOp op{};
  op.heads = f.columns();
  const TensorView& cos = *f.tensor("cosines");
  const TensorView& sin = *f.tensor("sines");
  const TensorView* axes = f.tensor("axes", true);
  f.expect_type(cos, ValueType::kFloat32, "cosines");
  f.expect_type(sin, ValueType::kFloat32, "sines");
  f.expect(cos.sizes.size() == 2 && cos.sizes[1] > 0 && cos.sizes[1] % 2 == 0,
           "has cosines that are not [positions, rotary] with an even number of columns");
  f.expect_sizes(sin, cos.sizes, "sines");
  RopeTable table{};
  table.cos = static_cast<const float*>(cos.data);
  table.sin = static_cast<const float*>(sin.data);
  table.num_positions = static_cast<size_t>(cos.sizes[0]);
  table.rotary = static_cast<size_t>(cos.sizes[1]);
  f.expect(table.rotary <= op.heads.head_size, "rotates ", table.rotary, " values of heads of ",
           op.heads.head_size);
  if (axes != nullptr) {
    f.expect_type(*axes, ValueType::kInt32, "axes");
    f.expect_sizes(*axes, {cos.sizes[1]}, "axes");
    table.axes = static_cast<const int32_t*>(axes->data);
    for (size_t i = 0; i < table.rotary; ++i) {
      f.expect(table.axes[i] >= 0 && table.axes[i] < 3, "has axis ", table.axes[i]);
    }
  }
  op.is_interleaved = f.flag();
  op.round_products = f.flag();
  op.table = table_number(f.program(), table);
  return op;
}

Operation read_attention(Fields& f) {
  AttentionOp op{};
  op.query = f.columns();
  op.key = f.columns();
  op.value = f.columns();
  op.output = f.target();
  op.group = static_cast<size_t>(f.integer(0, 1 << 16, "KV group"));
  op.layer = f.integer(0, 1 << 24, "layer");
  op.scale = static_cast<float>(f.real("scale"));
  op.window = f.integer(0, std::numeric_limits<int32_t>::max(), "window");
  op.softcap = static_cast<float>(f.real("softcap"));
  const TensorView* sinks = f.tensor("sinks", true);
  f.expect(op.output != op.query.reg && op.output != op.key.reg && op.output != op.value.reg,
           "writes a register that it reads");
  f.expect(op.key.num_heads == op.value.num_heads, "has ", op.key.num_heads, " heads of keys and ",
           op.value.num_heads, " of values");
  f.expect(op.query.num_heads % op.key.num_heads == 0, "has ", op.query.num_heads,
           " query heads, no multiple of its ", op.key.num_heads, " KV heads");
  f.expect(op.key.head_size <= op.query.head_size && op.value.head_size <= op.query.head_size,
           "has keys of ", op.key.head_size, " and values of ", op.value.head_size,
           ", wider than its queries of ", op.query.head_size);
  f.expect(f.width(op.output) == op.query.num_heads * op.value.head_size, "gives ",
           op.query.num_heads * op.value.head_size, " columns, register ", op.output, " has ",
           f.width(op.output));
  f.expect(op.scale > 0, "has scale ", op.scale);
  f.expect(op.softcap >= 0, "has softcap ", op.softcap);
  if (sinks != nullptr) {
    f.expect_type(*sinks, ValueType::kFloat32, "sinks");
    f.expect_sizes(*sinks, {static_cast<int64_t>(op.query.num_heads)}, "sinks");
    op.sinks = static_cast<const float*>(sinks->data);
  }
  f.program().num_groups = std::max(f.program().num_groups, op.group + 1);
  return op;
}

Operation read_gated_activation(Fields& f) {
  GatedActivationOp op{};
  op.input = f.source();
  op.output = f.target();
  op.activation = f.activation();
  f.expect(op.input != op.output && f.width(op.input) == 2 * f.width(op.output), "halves ",
           f.width(op.input), " columns into ", f.width(op.output));
  return op;
}

Operation read_activation(Fields& f) {
  ActivationOp op{};
  op.input = f.source();
  op.output = f.target();
  op.activation = f.activation();
  expect_equal_widths(f, op.input, op.output);
  return op;
}

Operation read_add(Fields& f) {
  AddOp op{};
  op.output = f.changed();
  op.input = f.source();
  op.scale = static_cast<float>(f.real("scale"));
  expect_equal_widths(f, op.input, op.output);
  return op;
}

Operation read_scale(Fields& f) {
  ScaleOp op{};
  op.output = f.changed();
  op.scale = static_cast<float>(f.real("scale"));
  return op;
}

Operation read_copy(Fields& f) {
  CopyOp op{};
  op.input = f.source();
  op.output = f.target();
  op.start = static_cast<size_t>(f.integer(0, kMostColumns, "a first column"));
  f.expect(op.start + f.width(op.output) <= f.width(op.input), "copies columns ", op.start, " to ",
           op.start + f.width(op.output), " of register ", op.input, ", which has ",
           f.width(op.input));
  return op;
}

Operation read_tap(Fields& f) {
  TapOp op{};
  op.input = f.source();
  op.layer = f.integer(0, 1 << 24, "layer");
  expect_equal_widths(f, op.input, f.program().output);
  return op;
}

Operation read_add_embeds(Fields& f) {
  AddEmbedsOp op{};
  op.output = f.changed();
  op.level = static_cast<size_t>(f.integer(0, 1 << 16, "level"));
  expect_equal_widths(f, op.output, 0);
  f.program().num_levels = std::max(f.program().num_levels, op.level + 1);
  return op;
}

Operation read_call(Fields& f) {
  CallOp op{};
  op.input = f.source();
  op.output = f.target();
  return op;
}

using Reader = Operation (*)(Fields&);

// By the number of the kind, as in encoding.py.
constexpr Reader kReaders[] = {&read_linear,
                               &read_rms_norm,
                               &read_layer_norm,
                               &read_head_norm,
                               &read_rope,
                               &read_attention,
                               &read_gated_activation,
                               &read_activation,
                               &read_add,
                               &read_scale,
                               &read_copy,
                               &read_tap,
                               &read_add_embeds,
                               &read_call,
                               &read_quantized_linear};

Program empty_program(const EncodedProgram& encoded) {
  Program program{};
  program.type = encoded.type;
  check(!encoded.widths.empty(), kOp, "there are no registers");
  for (const int64_t width : encoded.widths) {
    check(width >= 1 && width <= kMostColumns, kOp, "a register has ", width, " columns");
    program.widths.push_back(static_cast<size_t>(width));
  }
  const auto count = static_cast<int64_t>(program.widths.size());
  check(encoded.output >= 0 && encoded.output < count, kOp, "the output is register ",
        encoded.output, " of ", count);
  program.output = static_cast<size_t>(encoded.output);
  return program;
}

}  // namespace

std::string place_of(const Program& program, size_t index) {
  return "instruction " + std::to_string(index) + " (" + program.code[index].name + ")";
}

Program decode_program(const EncodedProgram& encoded) {
  Program program = empty_program(encoded);
  std::vector<bool> is_written(program.widths.size(), false);
  is_written[0] = true;
  constexpr size_t kHead = 3;
  constexpr auto kKinds = static_cast<int64_t>(std::size(kReaders));
  for (size_t at = 0; at < encoded.code_size;) {
    const size_t index = program.code.size();
    const std::string name = index < encoded.names.size() ? encoded.names[index] : "unnamed";
    const std::string place = "instruction " + std::to_string(index) + " (" + name + ")";
    Fields fields(encoded, program, is_written, place);
    fields.expect(at + kHead <= encoded.code_size, "is cut short");
    const int64_t kind = encoded.code[at];
    const int64_t phase = encoded.code[at + 1];
    const int64_t length = encoded.code[at + 2];
    at += kHead;
    fields.expect(kind >= 0 && kind < kKinds, "is of unknown kind ", kind);
    fields.expect(phase >= 0 && phase < 4096, "has phase ", phase);
    fields.expect(length >= 0 && static_cast<size_t>(length) <= encoded.code_size - at,
                  "is cut short");
    fields.point_at(encoded.code + at, encoded.code + at + length);
    const Operation operation = kReaders[kind](fields);
    fields.check_all_read();
    fields.mark_written();
    at += static_cast<size_t>(length);
    program.code.push_back({operation, static_cast<size_t>(phase), name});
    program.num_phases = std::max(program.num_phases, static_cast<size_t>(phase) + 1);
  }
  check(is_written[program.output], kOp, "nothing writes the output, register ", program.output);
  return program;
}

}  // namespace plait
