import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.flink.api.connector.source.Boundedness;
import org.apache.flink.api.connector.source.ReaderOutput;
import org.apache.flink.api.connector.source.Source;
import org.apache.flink.api.connector.source.SourceReader;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.connector.source.SourceSplit;
import org.apache.flink.api.connector.source.SplitEnumerator;
import org.apache.flink.api.connector.source.SplitEnumeratorContext;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.ReadableConfig;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.core.io.InputStatus;
import org.apache.flink.core.io.SimpleVersionedSerializer;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.Table;
import org.apache.flink.table.api.TableDescriptor;
import org.apache.flink.table.api.TableEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.connector.source.SourceProvider;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.factories.FactoryUtil;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;
import org.apache.flink.util.CloseableIterator;

/**
 * Runs Nexmark's queries in Flink SQL, in this process, one after the other.
 *
 * <p>The arguments are options of Flink, each as key=value. Each line of the input is a query: events, events of a
 * split, events in a second of event time, seconds to wait behind the last event, a file for the rows of the result or
 * nothing, and the text, with tabs between them. Two lines answer it: RUNNING when all readers have started, and
 * FINISHED, or FAILED and the reason. The file has a line of names and the rows of the final table, with tabs between
 * the fields.
 */
public final class Nexmark {
    private static volatile CountDownLatch readers = new CountDownLatch(0);

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        Configuration configuration = new Configuration();
        for (String argument : arguments) {
            String[] parts = argument.split("=", 2);
            configuration.setString(parts[0], parts[1]);
        }
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            try {
                run(line.split("\t", 6), configuration, answers);
            } catch (Exception error) {
                error.printStackTrace();
                Throwable cause = error;
                while (cause.getCause() != null) cause = cause.getCause();
                answers.println("FAILED " + cause.toString().replace('\n', ' '));
            }
        }
    }

    private static void run(String[] request, Configuration configuration, PrintStream answers) throws Exception {
        TableEnvironment tables = TableEnvironment.create(
                EnvironmentSettings.newInstance().inStreamingMode().withConfiguration(configuration).build());
        tables.getConfig().set("table.local-time-zone", "UTC");
        createViews(tables, request);
        Table query = tables.sqlQuery(request[5]);
        readers = new CountDownLatch(Integer.parseInt(configuration.getString("parallelism.default", "1")));
        if (request[4].isEmpty()) {
            TableResult result = query.insertInto(TableDescriptor.forConnector("blackhole").build()).execute();
            JobClient job = result.getJobClient().orElseThrow();
            CompletableFuture<?> ended = job.getJobExecutionResult();
            while (!readers.await(5, TimeUnit.MILLISECONDS) && !ended.isDone()) {}
            answers.println("RUNNING");
            ended.get();
        } else {
            answers.println("RUNNING");
            Files.write(Path.of(request[4]), finalRows(query.execute()));
        }
        answers.println("FINISHED");
    }

    private static void createViews(TableEnvironment tables, String[] request) {
        tables.executeSql("CREATE TABLE events (event_type INT,"
                + " person ROW<id BIGINT, name STRING, emailAddress STRING, creditCard STRING, city STRING,"
                + " state STRING, `dateTime` TIMESTAMP(3), extra STRING>,"
                + " auction ROW<id BIGINT, itemName STRING, description STRING, initialBid BIGINT, reserve BIGINT,"
                + " `dateTime` TIMESTAMP(3), expires TIMESTAMP(6), seller BIGINT, category BIGINT, extra STRING>,"
                + " bid ROW<auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING,"
                + " `dateTime` TIMESTAMP(3), extra STRING>,"
                + " `dateTime` AS CASE WHEN event_type = 0 THEN person.`dateTime`"
                + " WHEN event_type = 1 THEN auction.`dateTime` ELSE bid.`dateTime` END,"
                + " WATERMARK FOR `dateTime` AS `dateTime` - INTERVAL '4' SECOND)"
                + " WITH ('connector' = 'nexmark', 'events' = '" + request[0] + "', 'per-split' = '" + request[1]
                + "', 'per-second' = '" + request[2] + "', 'linger-s' = '" + request[3] + "')");
        tables.executeSql("CREATE VIEW person AS SELECT person.id, person.name, person.emailAddress,"
                + " person.creditCard, person.city, person.state, `dateTime`, person.extra"
                + " FROM events WHERE event_type = 0");
        tables.executeSql("CREATE VIEW auction AS SELECT auction.id, auction.itemName, auction.description,"
                + " auction.initialBid, auction.reserve, `dateTime`, auction.expires, auction.seller,"
                + " auction.category, auction.extra FROM events WHERE event_type = 1");
        tables.executeSql("CREATE VIEW bid AS SELECT bid.auction, bid.bidder, bid.price, bid.channel, bid.url,"
                + " `dateTime`, bid.extra FROM events WHERE event_type = 2");
        tables.executeSql("CREATE VIEW clocked_bid AS SELECT *, PROCTIME() AS p_time FROM bid");
    }

    /** The rows that are left when all changes of a result are applied. */
    private static List<String> finalRows(TableResult result) throws Exception {
        Map<String, Integer> counts = new HashMap<>();
        try (CloseableIterator<Row> changes = result.collect()) {
            while (changes.hasNext()) {
                Row row = changes.next();
                boolean adds = row.getKind() == RowKind.INSERT || row.getKind() == RowKind.UPDATE_AFTER;
                String text = IntStream.range(0, row.getArity())
                        .mapToObj(at -> String.valueOf(row.getField(at)))
                        .collect(Collectors.joining("\t"));
                counts.merge(text, adds ? 1 : -1, Integer::sum);
            }
        }
        List<String> rows = new ArrayList<>();
        rows.add(String.join("\t", result.getResolvedSchema().getColumnNames()));
        counts.forEach((text, count) -> {
            if (count < 0) throw new IllegalStateException("more removals than rows: " + text);
            for (int at = 0; at < count; at++) rows.add(text);
        });
        return rows;
    }

    /** The connector of the table of events. */
    public static final class Factory implements DynamicTableSourceFactory {
        private static final ConfigOption<Long> EVENTS = ConfigOptions.key("events").longType().noDefaultValue();
        private static final ConfigOption<Long> PER_SPLIT = ConfigOptions.key("per-split").longType().noDefaultValue();
        private static final ConfigOption<Long> PER_SECOND = ConfigOptions.key("per-second").longType().noDefaultValue();
        private static final ConfigOption<Long> LINGER_S = ConfigOptions.key("linger-s").longType().noDefaultValue();

        @Override
        public String factoryIdentifier() {
            return "nexmark";
        }

        @Override
        public Set<ConfigOption<?>> requiredOptions() {
            return Set.of(EVENTS, PER_SPLIT, PER_SECOND, LINGER_S);
        }

        @Override
        public Set<ConfigOption<?>> optionalOptions() {
            return Set.of();
        }

        @Override
        public DynamicTableSource createDynamicTableSource(Context context) {
            FactoryUtil.TableFactoryHelper helper = FactoryUtil.createTableFactoryHelper(this, context);
            helper.validate();
            ReadableConfig options = helper.getOptions();
            return new EventTable(new Events(
                    options.get(EVENTS), options.get(PER_SPLIT), options.get(PER_SECOND), options.get(LINGER_S)));
        }
    }

    private record EventTable(Events events) implements ScanTableSource {
        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.insertOnly();
        }

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
            return SourceProvider.of(events);
        }

        @Override
        public DynamicTableSource copy() {
            return this;
        }

        @Override
        public String asSummaryString() {
            return "nexmark";
        }
    }

    /** Places of events from the next one to the last one, without the end. */
    public static final class Split implements SourceSplit {
        private long next;
        private final long end;

        Split(long next, long end) {
            this.next = next;
            this.end = end;
        }

        @Override
        public String splitId() {
            return String.valueOf(end);
        }
    }

    /** All events, in splits that readers ask for in turn. */
    public static final class Events implements Source<RowData, Split, Long> {
        private final long events;
        private final long perSplit;
        private final long perSecond;
        private final long lingerS;

        Events(long events, long perSplit, long perSecond, long lingerS) {
            this.events = events;
            this.perSplit = perSplit;
            this.perSecond = perSecond;
            this.lingerS = lingerS;
        }

        @Override
        public Boundedness getBoundedness() {
            return Boundedness.BOUNDED;
        }

        @Override
        public SplitEnumerator<Split, Long> createEnumerator(SplitEnumeratorContext<Split> context) {
            return new Enumerator(context, 0, events, perSplit);
        }

        @Override
        public SplitEnumerator<Split, Long> restoreEnumerator(SplitEnumeratorContext<Split> context, Long found) {
            return new Enumerator(context, found, events, perSplit);
        }

        @Override
        public SourceReader<RowData, Split> createReader(SourceReaderContext context) {
            return new Reader(context, new Generator(perSecond), lingerS);
        }

        @Override
        public SimpleVersionedSerializer<Split> getSplitSerializer() {
            return new Longs<>() {
                @Override
                long[] numbers(Split split) {
                    return new long[] {split.next, split.end};
                }

                @Override
                Split value(long[] numbers) {
                    return new Split(numbers[0], numbers[1]);
                }
            };
        }

        @Override
        public SimpleVersionedSerializer<Long> getEnumeratorCheckpointSerializer() {
            return new Longs<>() {
                @Override
                long[] numbers(Long found) {
                    return new long[] {found};
                }

                @Override
                Long value(long[] numbers) {
                    return numbers[0];
                }
            };
        }
    }

    private abstract static class Longs<T> implements SimpleVersionedSerializer<T> {
        abstract long[] numbers(T value);

        abstract T value(long[] numbers);

        @Override
        public int getVersion() {
            return 1;
        }

        @Override
        public byte[] serialize(T value) throws IOException {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            DataOutputStream output = new DataOutputStream(bytes);
            for (long number : numbers(value)) output.writeLong(number);
            return bytes.toByteArray();
        }

        @Override
        public T deserialize(int version, byte[] bytes) throws IOException {
            DataInputStream input = new DataInputStream(new ByteArrayInputStream(bytes));
            long[] numbers = new long[bytes.length / Long.BYTES];
            for (int at = 0; at < numbers.length; at++) numbers[at] = input.readLong();
            return value(numbers);
        }
    }

    private static final class Enumerator implements SplitEnumerator<Split, Long> {
        private final SplitEnumeratorContext<Split> context;
        private final ArrayDeque<Split> returned = new ArrayDeque<>();
        private final long events;
        private final long perSplit;
        private long found;

        Enumerator(SplitEnumeratorContext<Split> context, long found, long events, long perSplit) {
            this.context = context;
            this.found = found;
            this.events = events;
            this.perSplit = perSplit;
        }

        @Override
        public void start() {}

        @Override
        public void handleSplitRequest(int subtask, String host) {
            if (!returned.isEmpty()) {
                context.assignSplit(returned.poll(), subtask);
            } else if (found < events) {
                long end = Math.min(found + perSplit, events);
                context.assignSplit(new Split(found, end), subtask);
                found = end;
            } else {
                context.signalNoMoreSplits(subtask);
            }
        }

        @Override
        public void addSplitsBack(List<Split> splits, int subtask) {
            returned.addAll(splits);
        }

        @Override
        public void addReader(int subtask) {}

        @Override
        public Long snapshotState(long checkpoint) {
            return found;
        }

        @Override
        public void close() {}
    }

    private static final class Reader implements SourceReader<RowData, Split> {
        private static final int AT_ONCE = 100, AHEAD = 2;
        private final SourceReaderContext context;
        private final Generator generator;
        private final long lingerS;
        private final ArrayDeque<Split> splits = new ArrayDeque<>();
        private volatile CompletableFuture<Void> available = new CompletableFuture<>();
        private volatile boolean ended;

        Reader(SourceReaderContext context, Generator generator, long lingerS) {
            this.context = context;
            this.generator = generator;
            this.lingerS = lingerS;
        }

        @Override
        public void start() {
            readers.countDown();
            for (int ahead = splits.size(); ahead < AHEAD; ahead++) context.sendSplitRequest();
        }

        @Override
        public InputStatus pollNext(ReaderOutput<RowData> output) {
            Split split = splits.peek();
            if (split == null) {
                if (ended) return InputStatus.END_OF_INPUT;
                if (available.isDone()) available = new CompletableFuture<>();
                return InputStatus.NOTHING_AVAILABLE;
            }
            long end = Math.min(split.next + AT_ONCE, split.end);
            while (split.next < end) output.collect(generator.event(split.next++));
            if (end == split.end) {
                splits.poll();
                context.sendSplitRequest();
            }
            return InputStatus.MORE_AVAILABLE;
        }

        @Override
        public CompletableFuture<Void> isAvailable() {
            return splits.isEmpty() && !ended ? available : CompletableFuture.completedFuture(null);
        }

        @Override
        public void addSplits(List<Split> added) {
            splits.addAll(added);
            available.complete(null);
        }

        @Override
        public void notifyNoMoreSplits() {
            CompletableFuture.delayedExecutor(lingerS, TimeUnit.SECONDS).execute(() -> {
                ended = true;
                available.complete(null);
            });
        }

        @Override
        public List<Split> snapshotState(long checkpoint) {
            return splits.stream().map(split -> new Split(split.next, split.end)).collect(Collectors.toList());
        }

        @Override
        public void close() {}
    }

    /** Each event is a function of its place, as in benchmarks/nexmark/generator.py, where the rules are. */
    static final class Generator {
        private static final long START_US = 1_767_225_600_000_000L;
        private static final long FIRST_ID = 1_000;
        private static final int GROUP = 1_000, STEP = 953, PROPORTION = 50, AUCTIONS = 3, IN_FLIGHT = 100;
        private static final int ACTIVE = 1_000, LEAD = 10, HOT = 100, POOL = 4_096, PRICES = 65_536, CHANNELS = 10_000;
        private final long stepUs;

        Generator(long perSecond) {
            stepUs = 1_000_000 / perSecond;
        }

        RowData event(long place) {
            long number = place - place % GROUP + place * STEP % GROUP;
            int kind = (int) Math.min((number % PROPORTION + AUCTIONS - 1) / AUCTIONS, 2);
            Object row = kind == 0 ? person(number) : kind == 1 ? auction(number) : bid(number);
            return GenericRowData.of(kind, kind == 0 ? row : null, kind == 1 ? row : null, kind == 2 ? row : null);
        }

        private RowData person(long number) {
            long h = mixed(number);
            return GenericRowData.of(
                    lastPerson(number) + FIRST_ID,
                    Pools.NAMES[(int) below(h, 1, Pools.NAMES.length)],
                    Pools.EMAILS[(int) bits(h, 8, 12)],
                    Pools.CARDS[(int) bits(h, 20, 12)],
                    Pools.CITIES[(int) below(h, 32, Pools.CITIES.length)],
                    Pools.STATES[(int) below(h, 40, Pools.STATES.length)],
                    time(number),
                    Pools.PERSON_EXTRAS[(int) bits(mixed(h), 0, 12)]);
        }

        private RowData auction(long number) {
            long h = mixed(number);
            long g = mixed(h);
            long initial = Pools.PRICES_OF[(int) bits(h, 24, 16)];
            long hot = lastPerson(number) / HOT * HOT;
            long horizonUs = Math.max(1_000, (long) IN_FLIGHT * PROPORTION / AUCTIONS * stepUs);
            return GenericRowData.of(
                    lastAuction(number) + FIRST_ID,
                    Pools.ITEMS[(int) bits(h, 0, 12)],
                    Pools.DESCRIPTIONS[(int) bits(h, 12, 12)],
                    initial,
                    initial + Pools.PRICES_OF[(int) bits(h, 40, 16)],
                    time(number),
                    expires(number, 1_000 + below(g, 36, 2 * horizonUs)),
                    (bits(g, 0, 2) > 0 ? hot : somePerson(number, bits(g, 2, 24))) + FIRST_ID,
                    10 + below(g, 32, 5),
                    Pools.AUCTION_EXTRAS[(int) bits(g, 48, 12)]);
        }

        private RowData bid(long number) {
            long h = mixed(number);
            long g = mixed(h);
            long latest = lastAuction(number);
            long oldest = Math.max(latest - IN_FLIGHT, 0);
            long some = oldest + bits(h, 8, 20) % (latest - oldest + 1 + LEAD);
            long hot = lastPerson(number) / HOT * HOT + 1;
            int channel = (int) (bits(g, 16, 1) > 0 ? bits(g, 17, 2) : below(g, 20, CHANNELS) + 4);
            return GenericRowData.of(
                    (bits(h, 0, 1) > 0 ? latest / HOT * HOT : some) + FIRST_ID,
                    (bits(h, 1, 2) > 0 ? hot : somePerson(number, bits(h, 32, 24))) + FIRST_ID,
                    Pools.PRICES_OF[(int) bits(g, 0, 16)],
                    Pools.CHANNELS_OF[channel],
                    Pools.URLS[channel],
                    time(number),
                    Pools.BID_EXTRAS[(int) bits(g, 48, 12)]);
        }

        /** Flink's event time has whole milliseconds. */
        private TimestampData time(long number) {
            return TimestampData.fromEpochMillis((START_US + number * stepUs) / 1_000);
        }

        private TimestampData expires(long number, long laterUs) {
            long us = START_US + number * stepUs + laterUs;
            return TimestampData.fromEpochMillis(us / 1_000, (int) (us % 1_000) * 1_000);
        }

        private static long lastPerson(long number) {
            return number / PROPORTION;
        }

        private static long lastAuction(long number) {
            return number / PROPORTION * AUCTIONS + Math.min(number % PROPORTION - 1, AUCTIONS - 1);
        }

        private static long somePerson(long number, long hash) {
            long people = lastPerson(number) + 1;
            long active = Math.min(people, ACTIVE);
            return people - active + hash % (active + LEAD);
        }

        private static long bits(long hash, int at, int count) {
            return (hash >>> at) & ((1L << count) - 1);
        }

        private static long below(long hash, int at, long limit) {
            return (hash >>> at) % limit;
        }

        static long mixed(long value) {
            long z = value + 0x9E3779B97F4A7C15L;
            z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9L;
            z = (z ^ (z >>> 27)) * 0x94D049BB133111EBL;
            return z ^ (z >>> 31);
        }

        /** The values that text and prices are taken from. Text is encoded once. */
        private static final class Pools {
            static final StringData[] NAMES = names();
            static final StringData[] CITIES = encoded("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland",
                    "Bend", "Redmond", "Seattle", "Kent", "Cheyenne");
            static final StringData[] STATES = encoded("AZ", "CA", "ID", "OR", "WA", "WY");
            static final StringData[] EMAILS = emails();
            static final StringData[] CARDS = cards();
            static final StringData[] PERSON_EXTRAS = encoded(texts(3, POOL, 109, 163));
            static final StringData[] ITEMS = encoded(texts(4, POOL, 3, 20));
            static final StringData[] DESCRIPTIONS = encoded(texts(5, POOL, 3, 100));
            static final StringData[] AUCTION_EXTRAS = encoded(texts(6, POOL, 312, 468));
            static final StringData[] BID_EXTRAS = encoded(texts(7, POOL, 54, 82));
            static final long[] PRICES_OF = IntStream.range(0, PRICES)
                    .mapToLong(at -> (long) Math.rint(Math.pow(10, (double) at / PRICES * 6) * 100))
                    .toArray();
            static final StringData[] CHANNELS_OF = new StringData[CHANNELS + 4];
            static final StringData[] URLS = new StringData[CHANNELS + 4];

            static {
                String[] hot = {"Google", "Facebook", "Baidu", "Apple"};
                String[] paths = texts(8, CHANNELS + 4, 15, 16);
                for (int at = 0; at < paths.length; at++) {
                    String path = paths[at].replace(' ', '_');
                    String url = "https://www.nexmark.com/" + path.substring(0, 5) + "/" + path.substring(5, 10) + "/"
                            + path.substring(10) + "/item.htm?query=1";
                    long number = mixed(at - 4 + (9L << 32)) >>> 33;
                    URLS[at] = encoded(at < 4 || number % 10 == 0 ? url : url + "&channel_id=" + number)[0];
                    CHANNELS_OF[at] = encoded(at < 4 ? hot[at] : "channel-" + (at - 4))[0];
                }
            }

            private static StringData[] encoded(String... texts) {
                StringData[] found = new StringData[texts.length];
                for (int at = 0; at < texts.length; at++) {
                    found[at] = StringData.fromBytes(texts[at].getBytes(StandardCharsets.UTF_8));
                }
                return found;
            }

            private static StringData[] names() {
                String[] first = {"Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter",
                    "Walter"};
                String[] last = {"Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"};
                List<String> names = new ArrayList<>();
                for (String one : first) for (String other : last) names.add(one + " " + other);
                return encoded(names.toArray(String[]::new));
            }

            private static StringData[] emails() {
                String[] words = texts(1, POOL, 12, 13);
                for (int at = 0; at < POOL; at++) {
                    String word = words[at].replace(' ', '_');
                    words[at] = word.substring(0, 7) + "@" + word.substring(7) + ".com";
                }
                return encoded(words);
            }

            private static StringData[] cards() {
                String[] cards = new String[POOL];
                for (int at = 0; at < POOL; at++) {
                    long number = Long.remainderUnsigned(mixed(at + (2L << 32)), 10_000_000_000_000_000L);
                    cards[at] = String.format("%016d", number).replaceAll("(.{4})(?=.)", "$1 ");
                }
                return encoded(cards);
            }

            private static String[] texts(int number, int count, int least, int most) {
                String[] found = new String[count];
                for (int at = 0; at < count; at++) {
                    long head = mixed(at + ((long) number << 40));
                    byte[] letters = new byte[least + (int) Long.remainderUnsigned(head, most - least)];
                    for (int letter = 0; letter < letters.length; letter++) {
                        long hash = mixed((long) at * most + letter + ((long) number << 44));
                        letters[letter] = (byte) (Long.remainderUnsigned(hash, 13) == 0 ? ' ' : 'a' + (hash >>> 20) % 26);
                    }
                    found[at] = new String(letters, StandardCharsets.US_ASCII);
                }
                return found;
            }
        }
    }
}
