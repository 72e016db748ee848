// Rates, shares and percentiles from two readings of the server's counters. Pure functions.

const SPAN_S = 10;  // shares and percentiles look back so far, rates to the reading before

export function percentile(bounds, counts, share) {
  const all = counts.reduce((sum, n) => sum + n, 0);
  if (!all) return null;
  let left = share * all;
  for (let i = 0; i < counts.length; i++) {
    if (left <= counts[i] && counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      return i < bounds.length ? low + (bounds[i] - low) * left / counts[i] : low;
    }
    left -= counts[i];
  }
  return bounds[bounds.length - 1];
}

function percentiles(now, then) {
  if (!now) return [null, null, null];
  const counts = now.counts.map((n, i) => n - (then ? then.counts[i] : 0));
  return [0.5, 0.95, 0.99].map((share) => {
    const found = percentile(now.bounds_s, counts, share);
    return found === null ? null : found * 1000;
  });
}

const ratio = (part, whole) => (whole > 0 ? 100 * part / whole : null);

// What the charts show at one moment. `readings` are earlier ones, oldest first, then this one.
export function moment(readings) {
  const now = readings[readings.length - 1];
  const before = readings[readings.length - 2] || now;
  const then = readings.find((r) => now.uptime_s - r.uptime_s <= SPAN_S) || now;
  const rate = (name) => (now === before ? null : (now[name] - before[name]) / (now.uptime_s - before.uptime_s));
  const prompt = now.prompt_tokens - then.prompt_tokens;
  const tiers = now.kv.tiers.map((tier) => {
    const old = then.kv.tiers.find((t) => t.tier === tier.tier) || tier;
    return {
      name: tier.tier, used: tier.used_bytes, capacity: tier.capacity_bytes,
      fill: ratio(tier.used_bytes, tier.capacity_bytes), hit: ratio(tier.hit_tokens - old.hit_tokens, prompt),
      hits: tier.hit_tokens,
    };
  });
  return {
    running: now.requests_running, waiting: now.requests_waiting,
    generated: rate("generated_tokens"), prompt: rate("prompt_tokens"),
    first: percentiles(now.latency?.first_token, then.latency?.first_token),
    gap: percentiles(now.latency?.inter_token, then.latency?.inter_token),
    hit: ratio(now.cached_prompt_tokens - then.cached_prompt_tokens, prompt), tiers,
  };
}

// Whether the counters began anew: another engine has been loaded.
export const restarted = (before, now) =>
  now.uptime_s <= before.uptime_s || now.generated_tokens < before.generated_tokens ||
  now.prompt_tokens < before.prompt_tokens;
