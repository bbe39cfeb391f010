// Declares the library and binds the attention ops to torch: checks every argument and hands
// pointers and sizes to the algorithms, which know no torch. binding_*.cpp bind the other ops.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "attention_checks.h"
#include "binding_parallel.h"
#include "checks.h"
#include "cpu_features.h"
#include "kv_write.h"
#include "paged_attention.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- checks: every message begins with the op's name ---------------------------------------------

using plait::check;

std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < t.dim(); ++i) text << (i == 0 ? "" : ", ") << t.size(i);
  text << ']';
  return text.str();
}

// A size of -1 fits any; `symbols` names the sizes for the message, as "[S, B]".
void check_shape(const Tensor& t, std::initializer_list<int64_t> sizes, const char* op,
                 const char* name, const char* symbols) {
  bool fits = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t i = 0;
  for (int64_t size : sizes) {
    fits = fits && (size < 0 || t.size(i) == size);
    ++i;
  }
  check(fits, op, name, " must be ", symbols, ", it is ", shape_of(t));
}

void check_type(const Tensor& t, ScalarType type, const char* op, const char* name,
                const char* type_name) {
  check(t.is_cpu(), op, name, " must be on the CPU");
  check(t.scalar_type() == type, op, name, " must be ", type_name);
}

// The last dimension must be dense; a dimension of one element may have any stride.
void check_dense_last(const Tensor& t, const char* op, const char* name) {
  const int64_t last = t.dim() - 1;
  check(t.stride(last) == 1 || t.size(last) <= 1, op, name,
        " must be dense along its last dimension");
}

struct PageShape {
  int64_t num_blocks, num_layers, num_kv_heads, block_size, slot_size;
  int64_t element_size;
  bool is_codes;

  int64_t head_size() const { return is_codes ? slot_size - plait::kKvScaleBytes : slot_size; }
  int64_t half() const { return num_kv_heads * block_size * slot_size; }  // K or V of a layer
  int64_t block_stride() const { return num_layers * 2 * half(); }
};

PageShape check_pages(const Tensor& pages, int64_t layer, const char* op) {
  check(pages.is_cpu(), op, "pages must be on the CPU");
  check_shape(pages, {-1, -1, 2, -1, -1, -1}, op, "pages",
              "[num_blocks, L, 2, Hkv, block_size, D]");
  const ScalarType type = pages.scalar_type();
  const bool is_codes = type == ScalarType::Char;
  check(type == ScalarType::Float || type == ScalarType::BFloat16 || is_codes, op,
        "pages must be float32, bfloat16 or int8");
  check(pages.is_contiguous(), op, "pages must be contiguous");
  PageShape shape{pages.size(0), pages.size(1), pages.size(3),
                  pages.size(4), pages.size(5), type == ScalarType::Float ? 4 : is_codes ? 1 : 2,
                  is_codes};
  check(shape.half() > 0 && shape.head_size() > 0, op, "pages must hold something, they are ",
        shape_of(pages));
  check(layer >= 0 && layer < shape.num_layers, op, "layer ", layer, " is not one of the ",
        shape.num_layers, " layers in pages");
  return shape;
}

// Rows beside pages: of their dtype, but of either one beside codes.
ScalarType check_row_type(const Tensor& t, const Tensor& pages, const PageShape& shape,
                          const char* op, const char* name) {
  const ScalarType type = shape.is_codes ? t.scalar_type() : pages.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::BFloat16, op, name,
        " must be float32 or bfloat16");
  check_type(t, type, op, name, "of the pages' dtype");
  return type;
}

// --- kv_write
// --------------------------------------------------------------------------------------

plait::KvRows check_rows(const Tensor& t, const Tensor& pages, const PageShape& shape,
                         int64_t num_tokens, const char* name) {
  constexpr const char* op = "kv_write";
  check_shape(t, {num_tokens, shape.num_kv_heads, -1}, op, name, "[T, Hkv, D]");
  const ScalarType type = check_row_type(t, pages, shape, op, name);
  check(t.size(2) <= shape.head_size(), op, name, " has head size ", t.size(2),
        ", the pages have only ", shape.head_size());
  check_dense_last(t, op, name);
  const int64_t size = type == ScalarType::Float ? 4 : 2;
  return {static_cast<const char*>(t.const_data_ptr()), t.stride(0) * size, t.stride(1) * size,
          t.size(2) * size};
}

void kv_write(const Tensor& pages, int64_t layer, const Tensor& key, const Tensor& value,
              const Tensor& slot_mapping) {
  constexpr const char* op = "kv_write";
  const PageShape shape = check_pages(pages, layer, op);
  check_shape(slot_mapping, {-1}, op, "slot_mapping", "[T]");
  check_type(slot_mapping, ScalarType::Long, op, "slot_mapping", "int64");
  check(slot_mapping.is_contiguous(), op, "slot_mapping must be contiguous");
  const int64_t num_tokens = slot_mapping.size(0);
  const plait::KvRows k = check_rows(key, pages, shape, num_tokens, "key");
  const plait::KvRows v = check_rows(value, pages, shape, num_tokens, "value");

  const auto* slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  const int64_t num_slots = shape.num_blocks * shape.block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    check(slots[i] < num_slots, op, "slot ", slots[i], " of row ", i, " is beyond the ", num_slots,
          " slots of pages");
  }

  const int64_t size = shape.element_size;
  plait::KvPages to{};
  to.data = static_cast<char*>(pages.mutable_data_ptr()) + layer * 2 * shape.half() * size;
  to.block_stride = shape.block_stride() * size;
  to.value_offset = shape.half() * size;
  to.head_bytes = shape.slot_size * size;
  to.block_size = shape.block_size;
  if (shape.is_codes) {
    check_type(value, key.scalar_type(), op, "value", "of the key's dtype");
    to.codes = key.scalar_type() == ScalarType::Float ? plait::KvCodes::kOfFloat32
                                                      : plait::KvCodes::kOfBfloat16;
  }
  const int64_t row_bytes = 2 * shape.num_kv_heads * to.head_bytes;
  const int64_t grain = std::max<int64_t>(1, 200'000 / row_bytes);  // about 20 µs of copying
  const plait::Body write = [&](size_t begin, size_t end) {
    plait::kv_write(to, k, v, slots, shape.num_kv_heads, static_cast<int64_t>(begin),
                    static_cast<int64_t>(end));
  };
  plait::op_parallel_for(static_cast<size_t>(num_tokens), static_cast<size_t>(grain), write);
}

// --- paged_attention
// -------------------------------------------------------------------------------

template <class T>
const T* dense_data(const Tensor& t, const char* name) {
  check(t.is_contiguous(), "paged_attention", name, " must be contiguous");
  return static_cast<const T*>(t.const_data_ptr());
}

Tensor paged_attention(const Tensor& query, const Tensor& pages, int64_t layer,
                       const Tensor& block_table, const Tensor& query_start, const Tensor& seq_lens,
                       double scale, std::optional<int64_t> window, std::optional<double> softcap,
                       const std::optional<Tensor>& sinks, const std::optional<Tensor>& ranges) {
  constexpr const char* op = "paged_attention";
  const PageShape shape = check_pages(pages, layer, op);
  check_shape(query, {-1, -1, shape.head_size()}, op, "query", "[T, Hq, D] with the pages' D");
  const ScalarType type = check_row_type(query, pages, shape, op, "query");
  check_dense_last(query, op, "query");
  check(query.size(1) > 0 && query.size(1) % shape.num_kv_heads == 0, op, query.size(1),
        " query heads are no multiple of the ", shape.num_kv_heads, " KV heads");
  check_shape(seq_lens, {-1}, op, "seq_lens", "[S]");
  check_type(seq_lens, ScalarType::Int, op, "seq_lens", "int32");
  check_shape(query_start, {seq_lens.size(0) + 1}, op, "query_start", "[S + 1]");
  check_type(query_start, ScalarType::Int, op, "query_start", "int32");
  check_shape(block_table, {seq_lens.size(0), -1}, op, "block_table", "[S, B]");
  check_type(block_table, ScalarType::Int, op, "block_table", "int32");
  check_dense_last(block_table, op, "block_table");
  check(scale > 0 && std::isfinite(scale), op, "scale must be positive, it is ", scale);
  check(window.value_or(1) >= 1, op, "window must be at least 1, it is ", window.value_or(1));
  check(softcap.value_or(1) > 0 && std::isfinite(softcap.value_or(1)), op,
        "softcap must be positive, it is ", softcap.value_or(1));

  plait::AttentionProblem p{};
  p.query = query.const_data_ptr();
  p.query_token_stride = query.stride(0);
  p.query_head_stride = query.stride(1);
  p.pages = static_cast<const char*>(pages.const_data_ptr()) +
            layer * 2 * shape.half() * shape.element_size;
  p.num_blocks = shape.num_blocks;
  p.block_stride = shape.block_stride();
  p.value_offset = shape.half();
  p.slot_stride = shape.slot_size;
  p.block_size = shape.block_size;
  p.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  p.block_table_stride = block_table.stride(0);
  p.query_start = dense_data<int32_t>(query_start, "query_start");
  p.seq_lens = dense_data<int32_t>(seq_lens, "seq_lens");
  p.num_spans = seq_lens.size(0);
  p.num_heads = query.size(1);
  p.num_kv_heads = shape.num_kv_heads;
  p.head_size = shape.head_size();
  p.scale = static_cast<float>(scale);
  p.window = window.value_or(0);
  p.softcap = static_cast<float>(softcap.value_or(0.0));
  p.is_bf16 = type == ScalarType::BFloat16;
  p.is_codes = shape.is_codes;
  if (sinks.has_value()) {
    check_shape(*sinks, {p.num_heads}, op, "sinks", "[Hq]");
    check_type(*sinks, ScalarType::Float, op, "sinks", "float32");
    p.sinks = dense_data<float>(*sinks, "sinks");
  }
  plait::check_spans(p, query.size(0), block_table.size(1), op);
  std::vector<int32_t> ends;
  if (ranges.has_value() && ranges->size(0) > 0) {
    check_shape(*ranges, {-1, 3}, op, "ranges", "[N, 3]");
    check_type(*ranges, ScalarType::Int, op, "ranges", "int32");
    plait::find_key_ends(p, dense_data<int32_t>(*ranges, "ranges"), ranges->size(0), op, ends);
    p.key_ends = ends.data();
  }

  Tensor out = torch::stable::new_empty(query, {query.size(0), p.num_heads, p.head_size});
  p.out = out.mutable_data_ptr();
  plait::paged_attention(p, plait::cpu_isa(), plait::op_num_threads(), plait::op_run_workers);
  return out;
}

// --- about the library
// -----------------------------------------------------------------------------

// What this library is, for start-up logs and bug reports: version and compiler.
std::string build_info() { return std::string("plait ") + PLAIT_VERSION + ", " + __VERSION__; }

// The instruction set in use, as PLAIT_CPU_ISA names it.
std::string cpu_isa() { return plait::cpu_isa_name(plait::cpu_isa()); }

}  // namespace

STABLE_TORCH_LIBRARY(plait, m) {
  m.def("build_info() -> str");
  m.def("cpu_isa() -> str");
  m.def(
      "kv_write(Tensor(a!) pages, int layer, Tensor key, Tensor value, Tensor slot_mapping) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor pages, int layer, Tensor block_table, "
      "Tensor query_start, Tensor seq_lens, float scale, int? window, float? softcap, "
      "Tensor? sinks, Tensor? ranges=None) -> Tensor");
}

// An op without a tensor argument has no device to be dispatched by.
STABLE_TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("kv_write", TORCH_BOX(&kv_write));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
}
