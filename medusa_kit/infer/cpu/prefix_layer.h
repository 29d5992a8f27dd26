// A decoder layer over the final hidden states of all nodes, which heads read (heads/prefix_layer.py).
// It runs after the base's layers, and its keys and values are the cache's layer after theirs.
#pragma once
#include "attention.h"
#include "norms.h"

namespace {

// The last nodes of chains, as in prompts, where no other is wanted: each as a row's only node, after
// a longer prefix.
struct Ends {
    Step step;
    std::vector<int64_t> starts, lengths, depths;
    std::vector<uint8_t> sees;

    explicit Ends(const Step& s) : step(s), starts(s.batch + 1), lengths(s.batch), depths(s.batch), sees(s.batch, 1) {
        for (int64_t b = 0; b <= s.batch; ++b) starts[b] = b;
        for (int64_t b = 0; b < s.batch; ++b) lengths[b] = s.lengths[b] + s.starts[b + 1] - s.starts[b] - 1;
        step.nodes = s.batch;
        step.starts = starts.data();
        step.lengths = lengths.data();
        step.depths = depths.data();
        step.sees = sees.data();
    }

    static bool are_all_wanted(const Step& s) {
        if (s.num_kept != s.batch || s.nodes == s.batch) return false;
        const uint8_t* sees = s.sees;
        for (int64_t b = 0; b < s.batch; ++b) {
            const int64_t first = s.starts[b], count = s.starts[b + 1] - first;
            if (s.kept[b] != first + count - 1) return false;
            for (int64_t node = 0; node < count; ++node)
                if (s.depths[first + node] != node || !sees[(count - 1) * count + node]) return false;
            sees += count * count;
        }
        return true;
    }
};

// `Run`: of a decoder's layers over the nodes of a step.
template <class Run> class PrefixLayer {
  public:
    PrefixLayer(const Decoder& base, const Step& s, Pool& p, int threads)
        : base(base), d(*base.prefix), s(s), p(p), ones(d.hidden, 1.0f), whole(d, s, p, threads) {
        if (!Ends::are_all_wanted(s)) return;
        ends.reset(new Ends(s));
        last.reset(new Run(d, ends->step, p, threads));
    }

    // x: what the base's last layer returns. Keys and values are needed of all nodes, outputs of some.
    void all(const float* x, int id) {
        for (int64_t row = id; row < s.nodes; row += p.active()) {
            const float* from = x + row * d.hidden;
            float* to = whole.x.data() + row * d.hidden;
            scale_by(from, base.final_norm, rms_factor(from, d.hidden, base.norm_epsilon), d.hidden, to);
            rms_norm_in_place(to, ones.data(), d.hidden, d.norm_epsilon);
        }
        p.barrier(id);
        whole.lay_keys(d.layers[0], base.num_layers, id);
        if (last) take_ends(id);
        Run& outputs = last ? *last : whole;
        outputs.add_branches(d.layers[0], base.num_layers, id);
        for (int64_t i = id; i < s.num_kept && id < p.active(); i += p.active()) {
            const float* from = outputs.x.data() + (last ? i : s.kept[i]) * d.hidden;
            scale_by(from, d.final_norm, rms_factor(from, d.hidden, d.norm_epsilon), d.hidden, s.prefix_out + i * d.hidden);
        }
    }

  private:
    const Decoder &base, &d;
    const Step& s;
    Pool& p;
    std::vector<float> ones;
    Run whole;
    std::unique_ptr<Ends> ends;
    std::unique_ptr<Run> last;

    void take_ends(int id) {
        const int64_t width = (int64_t)whole.qkv.size() / s.nodes;
        for (int64_t i = id; i < s.num_kept; i += p.active()) {
            const int64_t node = s.kept[i];
            std::copy_n(whole.x.data() + node * d.hidden, d.hidden, last->x.data() + i * d.hidden);
            std::copy_n(whole.qkv.data() + node * width, width, last->qkv.data() + i * width);
        }
        p.barrier(id);
    }
};

}  // namespace
