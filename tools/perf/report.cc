#include "quern/tools/perf/report.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace quern {
namespace {

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class JsonObject {
 public:
  void Add(absl::string_view key, absl::string_view text) {
    Append(key, Quoted(text));
  }
  void Add(absl::string_view key, const std::string& text) {
    Append(key, Quoted(text));
  }
  void Add(absl::string_view key, int64_t value) {
    Append(key, absl::StrCat(value));
  }
  void Add(absl::string_view key, double value) {
    Append(key, std::isfinite(value) ? Number(value) : "null");
  }
  void AddUnlessEmpty(absl::string_view key, const std::string& text) {
    Append(key, text.empty() ? "null" : Quoted(text));
  }
  std::string Finish() const { return absl::StrCat("{", text_, "}"); }

 private:
  static std::string Number(double value) {
    // Whole numbers (bytes, flops) in full: they are exact.
    if (value == std::floor(value) && std::abs(value) < 1e15) {
      return absl::StrFormat("%.0f", value);
    }
    return absl::StrFormat("%.6g", value);
  }
  void Append(absl::string_view key, absl::string_view value) {
    absl::StrAppend(&text_, text_.empty() ? "" : ", ", Quoted(key), ": ",
                    value);
  }

  std::string text_;
};

// Right-aligned; "-" where absent or zero.
std::string Cell(double value, int width, const char* unit = "") {
  if (!std::isfinite(value) || value == 0) {
    return absl::StrFormat("%*s", width, "-");
  }
  const double magnitude = std::abs(value);
  const int decimals = magnitude >= 1000 ? 0 : (magnitude >= 10 ? 1 : 2);
  return absl::StrFormat("%*s", width,
                         absl::StrFormat("%.*f%s", decimals, value, unit));
}

std::string Percent(double fraction, int width) {
  return Cell(std::isfinite(fraction) ? fraction * 100 : kAbsent, width, " %");
}

}  // namespace

double Row::per_cycle() const {
  const double giga = flops > 0 ? gflops() : gbps();
  return giga / (ghz * threads);
}

double Row::of_roof() const { return std::fmax(of_dram(), of_peak()); }

absl::Status CheckOfLimits(const Row& row) {
  const auto check = [&](absl::string_view field, double value, bool steady,
                         double limit, absl::string_view unit) {
    const double most = steady ? kMostOfLimit : kMostOfUnsteady;
    if (!(value > most)) return absl::OkStatus();
    return absl::InternalError(absl::StrFormat(
        "%s: %s=%.2f at %s; need at most %.2f of %s limit, %.1f %s", row.op,
        field, value, row.shape, most,
        steady ? "an undisturbed" : "a disturbed", limit, unit));
  };
  absl::Status status;
  if (row.dram_bounds) {
    status.Update(check("of_dram", row.of_dram(), row.dram_steady,
                        row.dram_gbps, "GB/s"));
  }
  if (row.peak_bounds) {
    status.Update(check("of_peak", row.of_peak(), row.peak_steady,
                        row.peak_gflops, "GFLOP/s"));
  }
  return status;
}

std::string JsonLine(const Row& row) {
  JsonObject json;
  json.Add("op", row.op);
  json.Add("shape", row.shape);
  json.AddUnlessEmpty("layer", row.layer);
  json.AddUnlessEmpty("command", row.command);
  json.Add("dtype", row.dtype);
  json.Add("isa", row.isa);
  json.Add("threads", static_cast<int64_t>(row.threads));
  json.Add("runs", row.runs);
  json.Add("median_us", row.median_us);
  json.Add("min_us", row.min_us);
  json.Add("bytes", row.bytes);
  json.Add("flops", row.flops);
  json.Add("gbps", row.gbps());
  json.Add("gflops", row.gflops());
  json.AddUnlessEmpty("dram_kind", row.dram_kind);
  json.Add("dram_gbps", row.dram_gbps);
  json.AddUnlessEmpty("peak_kind", row.peak_kind);
  json.Add("peak_gflops", row.peak_gflops);
  json.Add("of_dram", row.of_dram());
  json.Add("of_peak", row.of_peak());
  json.Add("of_roof", row.of_roof());
  json.Add("max_err", row.max_err);
  json.Add("dram_min_gbps", row.dram_min_gbps);
  json.Add("dram_max_gbps", row.dram_max_gbps);
  json.AddUnlessEmpty("pages", row.pages);
  json.AddUnlessEmpty("variant", row.variant);
  json.Add("sets", row.sets);
  json.Add("disturbed", row.disturbed);
  json.Add("ghz", row.ghz);
  json.Add("per_cycle", row.per_cycle());
  json.Add("limits", absl::string_view(row.steady() ? "steady" : "disturbed"));
  json.AddUnlessEmpty("note", row.note);
  return json.Finish();
}

std::string TableHeader() {
  return absl::StrFormat(
      "%-12s %-34s %-10s %-9s %3s %12s %12s %8s %9s %6s %8s %8s %8s %8s %9s "
      "%5s %7s",
      "op", "shape", "dtype", "isa", "thr", "median us", "min us", "GB/s",
      "GFLOP/s", "limit", "DRAM", "of DRAM", "of peak", "of roof", "max err",
      "GHz", "/cycle");
}

std::string TableLine(const Row& row) {
  std::string error = "-";
  if (std::isfinite(row.max_err)) error = absl::StrFormat("%.2g", row.max_err);
  std::string end = row.layer.empty() ? "" : "  " + row.layer;
  if (!row.note.empty()) end += "  " + row.note;
  return absl::StrFormat(
      "%-12s %-34s %-10s %-9s %3d %s %s %s %s %6s %s %s %s %s %9s %s %s%s",
      row.op, row.shape, row.dtype, row.isa, row.threads,
      Cell(row.median_us, 12), Cell(row.min_us, 12), Cell(row.gbps(), 8),
      Cell(row.gflops(), 9), row.dram_kind.empty() ? "-" : row.dram_kind,
      Cell(row.dram_gbps, 8), Percent(row.of_dram(), 8),
      Percent(row.of_peak(), 8), Percent(row.of_roof(), 8), error,
      Cell(row.ghz, 5), Cell(row.per_cycle(), 7), end);
}

}  // namespace quern
