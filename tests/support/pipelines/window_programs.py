"""Stateful PySpark programs. Spark and the engine run the same functions; only the format differs."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), tags ARRAY<STRING>, placed_at TIMESTAMP"


def pipeline(spark: SparkSession, source: str, path: str, output: str, rate: str = "0", *names: str) -> None:
    """Starts the queries below that are named, or all of them."""
    rows = spark.readStream.format(source).option("rowsPerSecond", rate).schema(SCHEMA).load(path)
    known = queries(rows)
    for name in names or known:
        frame, mode = known[name]
        writer = frame.hint("uid", f"{name}_rows").writeStream.format("parquet").outputMode(mode).queryName(name)
        writer.option("checkpointLocation", f"{output}/checkpoint-{name}").start(f"{output}/{name}")


def queries(rows: DataFrame) -> dict[str, tuple[DataFrame, str]]:
    """Returns each query with its output mode."""
    timed = rows.withWatermark("placed_at", "10 minutes")
    hours = (
        timed.groupBy(F.window("placed_at", "1 hour"), "country")
        .agg(F.sum("amount").alias("total"), F.count("*").alias("n"))
        .select("window", "country", "total", "n")
    )
    sliding = (
        timed.groupBy(F.window("placed_at", "1 hour", "20 minutes", "5 minutes"), F.upper("country").alias("country"))
        .agg(F.sum("quantity").alias("quantity"), F.avg("price").alias("price"))
        .where("quantity > 3")
        .select("window.start", "window.end", "country", "quantity", "price")
    )
    sessions = (
        timed.where("quantity = 7")
        .groupBy(F.session_window("placed_at", "5 minutes"), "country")
        .agg(F.count("amount").alias("n"), F.sum("price").alias("price"))
        .select("session_window.start", "session_window.end", "country", "n", "price")
    )
    gap = (
        F.when(F.col("country") == "DE", "10 minutes")
        .when(F.col("country") == "AU", "0 minutes")
        .otherwise("90 seconds")
    )
    gaps = (
        timed.where("quantity > 1")
        .groupBy("country", F.session_window("placed_at", gap))
        .agg(F.max("amount").alias("most"))
        .select("session_window", "country", "most")
    )
    chained = (
        timed.groupBy(F.window("placed_at", "30 minutes"), "country")
        .agg(
            F.count("*").alias("n"),
            F.hll_sketch_agg("quantity", 6).alias("hll"),
            F.theta_sketch_agg("amount", 7).alias("theta"),
            F.kll_sketch_agg_double(F.coalesce("amount", F.lit(0.0)), 4000).alias("kll"),
        )
        .groupBy(F.window(F.window_time("window"), "2 hours"))
        .agg(
            F.sum("n").alias("n"),
            F.count("*").alias("windows"),
            F.max("country").alias("last"),
            F.hll_sketch_estimate(F.hll_union_agg("hll")).alias("quantities"),
            F.theta_union_agg("theta", 8).alias("amounts"),
            F.theta_intersection_agg("theta").alias("common"),
            F.expr("kll_sketch_get_quantile_double(kll_merge_agg_double(kll), array(0.1, 0.5, 1.0))").alias("ranked"),
        )
        .select("window.start", "n", "windows", "last", "quantities", "amounts", "common", "ranked")
    )
    late = rows.withWatermark("placed_at", "12 hours").select("country", "placed_at")
    within = late.dropDuplicatesWithinWatermark(["country"]).select("country")
    minutes = (
        timed.groupBy(F.window("placed_at", "3 hours"))
        .agg(F.approx_count_distinct("placed_at").alias("times"), F.approx_count_distinct("price").alias("prices"))
        .select("window.start", "times", "prices")
    )
    return {
        "minutes": (minutes, "append"),
        "hours": (hours, "append"),
        "sliding": (sliding, "append"),
        "sessions": (sessions, "append"),
        "gaps": (gaps, "append"),
        "chained": (chained, "append"),
        "repeated": (timed.select("country", "quantity", "placed_at").dropDuplicates(), "append"),
        "within": (within, "append"),
        "distinct": (rows.select("country", "quantity").distinct(), "append"),
        "updated": (updated(timed), "update"),
        "statistics": (statistics(rows), "update"),
    }


def updated(timed: DataFrame) -> DataFrame:
    """Sliding windows whose rows come out again with each change.

    Spark itself fails if an aggregation has an ordered listagg and one with DISTINCT.
    """
    tags = F.expr("listagg(get(tags, 0), '+') WITHIN GROUP (ORDER BY get(tags, 0) DESC)")
    return (
        timed.groupBy(F.window("placed_at", "2 hours", "1 hour"), "country")
        .agg(F.sum("price").alias("price"), F.collect_set("quantity").alias("quantities"), tags.alias("tags"))
        .select("window.start", "country", "price", F.sort_array("quantities").alias("quantities"), "tags")
    )


def statistics(rows: DataFrame) -> DataFrame:
    """Every aggregate that is not bound to windows."""
    number, amount = F.col("quantity"), F.col("amount")
    hll = F.hll_sketch_agg(F.date_format("placed_at", "HH:mm:ss"), 8)
    theta, all_times = F.theta_sketch_agg(amount, 7), F.theta_sketch_agg(F.date_format("placed_at", "HH:mm:ss"))
    return rows.groupBy("country").agg(
        F.expr("count(amount, quantity)").alias("both"),
        F.count_if(number > 0).alias("positive"),
        F.sum(number).alias("sum"),
        F.try_sum(number).alias("tried"),
        F.expr("try_sum(9223372036854775807L - abs(quantity))").alias("exceeded"),
        F.sum("price").alias("price"),
        F.avg("price").alias("mean_price"),
        F.avg(number).alias("mean"),
        F.min("price").alias("least_price"),
        F.max("placed_at").alias("latest"),
        F.min(F.date_format("placed_at", "HH:mm")).alias("text"),
        F.bool_and(number > -4).alias("all"),
        F.every(number > 0).alias("every"),
        F.bool_or(number > 6).alias("some"),
        F.min_by("placed_at", F.col("placed_at")).alias("first_time"),
        F.max_by("quantity", "placed_at").alias("last_quantity"),
        F.expr("max_by(quantity, placed_at, 3)").alias("last_quantities"),
        F.expr("min_by(struct(price, tags), placed_at, 2) FILTER (WHERE quantity > 1)").alias("first_rows"),
        F.expr("min_by(price, if(quantity > 100, placed_at, null), 2)").alias("no_rows"),
        F.bit_and(number).alias("bits_and"),
        F.bit_or(number).alias("bits_or"),
        F.bit_xor(number).alias("bits_xor"),
        F.bitmap_construct_agg(F.bitmap_bit_position("quantity")).alias("bitmap"),
        F.bitmap_or_agg(F.encode(F.date_format("placed_at", "HH:mm:ss"), "utf-8")).alias("some_bitmap"),
        F.bitmap_and_agg(F.encode(F.date_format("placed_at", "HH:mm:ss"), "utf-8")).alias("all_bitmaps"),
        F.stddev(amount).alias("stddev"),
        F.stddev_pop(amount).alias("stddev_pop"),
        F.variance(number).alias("variance"),
        F.var_pop(number).alias("var_pop"),
        F.skewness(amount).alias("skewness"),
        F.kurtosis(amount).alias("kurtosis"),
        F.corr(amount, number).alias("corr"),
        F.covar_samp(amount, number).alias("covar_samp"),
        F.covar_pop(amount, number).alias("covar_pop"),
        F.median(amount).alias("median"),
        F.percentile(amount, 0.9).alias("percentile"),
        F.percentile(number, [0.25, 0.5]).alias("percentiles"),
        F.percentile_approx(amount, [0.0, 0.3, 0.5, 1.0]).alias("ranked"),
        F.percentile_approx("price", F.lit(0.9), F.lit(5000)).alias("ranked_price"),
        F.approx_percentile("placed_at", 0.25).alias("ranked_time"),
        F.expr("percentile_approx(quantity * 3037000499001L, array(0.4, 0.99)) FILTER (WHERE amount > 2)").alias(
            "ranked_n"
        ),
        F.product(F.when(number == 7, 1.5)).alias("product"),
        F.count_distinct("quantity").alias("distinct"),
        F.approx_count_distinct("placed_at").alias("times"),
        F.approx_count_distinct("amount", 0.1).alias("amounts"),
        F.approx_count_distinct(F.col("price"), 0.02).alias("prices"),
        F.sort_array(F.collect_set("quantity")).alias("set"),
        F.size(F.collect_list("amount")).alias("listed"),
        F.max(F.struct("placed_at", "quantity")).alias("latest_row"),
        F.min(F.struct(F.col("amount") * 0, "price", "country")).alias("least_row"),
        F.max("tags").alias("most_tags"),
        F.min(F.array(F.struct(number.alias("n")), F.struct((number % 3).alias("n")))).alias("least_rows"),
        F.max_by("placed_at", F.struct("tags", "placed_at")).alias("time_of_most_tags"),
        F.sort_array(F.collect_set(F.struct(number % 3, "price"))).alias("set_of_rows"),
        F.count_distinct("quantity", "price").alias("pairs"),
        F.count_distinct(F.struct("quantity", "amount")).alias("distinct_rows"),
        F.sum_distinct(number).alias("sum_of_distinct"),
        F.expr("avg(DISTINCT price) FILTER (WHERE quantity > 1)").alias("mean_of_distinct"),
        F.expr("stddev(DISTINCT quantity)").alias("deviation_of_distinct"),
        F.length(F.listagg(F.date_format("placed_at", "HH:mm"))).alias("length_of_texts"),
        F.string_agg(F.when(number > 100, "x"), "-").alias("no_texts"),
        F.expr("percentile_cont(0.3) WITHIN GROUP (ORDER BY amount)").alias("continuous"),
        F.regr_count(amount, number).alias("regr_count"),
        F.regr_avgx(amount, number).alias("regr_avgx"),
        F.regr_avgy(amount, number).alias("regr_avgy"),
        F.regr_sxx(amount, number).alias("regr_sxx"),
        F.regr_syy(amount, number).alias("regr_syy"),
        F.regr_sxy(amount, number).alias("regr_sxy"),
        F.regr_slope(amount, number).alias("regr_slope"),
        F.regr_intercept(amount, number).alias("regr_intercept"),
        F.regr_r2(amount, number).alias("regr_r2"),
        F.regr_r2(F.lit(1.5), number).alias("regr_r2_of_constant"),
        F.regr_r2(amount, F.lit(2)).alias("regr_r2_by_constant"),
        F.regr_slope(amount, F.lit(2)).alias("regr_slope_by_constant"),
        F.hll_sketch_estimate(F.hll_union(hll, hll)).alias("hll"),
        theta.alias("theta"),
        F.theta_union(theta, all_times, 9).alias("theta_union"),
        F.theta_intersection(theta, F.theta_sketch_agg(F.when(number > 1, amount))).alias("theta_intersection"),
        F.theta_sketch_estimate(F.theta_difference(all_times, theta)).alias("theta_difference"),
        F.expr("kll_sketch_get_quantile_bigint(kll_sketch_agg_bigint(coalesce(quantity, 0), 60000), 0.1)").alias("kll"),
        F.expr("kll_sketch_get_rank_float(kll_sketch_agg_float(ifnull(float(amount), 0f), 60000), 2.5f)").alias("rank"),
        F.vector_sum(F.expr("array(float(quantity), float(-0.0), float('inf'))")).alias("vector_sum"),
        F.vector_avg(F.expr("array(float(0), float('nan'))")).alias("vector_avg"),
        F.first("country").alias("first"),
        F.last("country", ignorenulls=True).alias("last"),
        F.any_value("country").alias("any"),
        F.expr("sum(10 - quantity) FILTER (WHERE quantity > 0)").alias("filtered"),
        F.expr("count(*) FILTER (WHERE amount > 5)").alias("large"),
        F.expr("count(DISTINCT get(tags, 0)) FILTER (WHERE quantity IS NOT NULL)").alias("letters"),
    )
